"""What generate promises beside the right logits: seeds, stopping, compilation, errors."""

import chex
import jax
import numpy as np
import pytest
from tiny_models import full_logits, make_model

from nagjax.errors import UserError
from nagjax.generate import sample
from nagjax.generate.sample import generate
from nagjax.residual.schemes.plain import Plain

PROMPTS = [[5, 1, 60], [9]]


@pytest.fixture(scope="module")
def model():
    return make_model(Plain())


@pytest.fixture(scope="module")
def draw(model):
    """One compiled shape for most tests: two prompts, 12 new tokens."""
    return lambda prompts, **options: generate(model, prompts, tokens=12, **options)


def test_seeds_reproduce_and_differ(draw):
    first = draw(PROMPTS, seed=3)
    assert first == draw(PROMPTS, seed=3)
    assert first != draw(PROMPTS, seed=4)
    assert first[0] != first[1]


def test_a_row_does_not_depend_on_the_rows_beside_it(draw):
    assert draw(PROMPTS)[0] == draw([PROMPTS[0], [1, 2, 3, 4, 5, 6]])[0]


def test_greedy_ignores_the_seed(draw):
    assert draw(PROMPTS, temperature=0.0, seed=1) == draw(PROMPTS, temperature=0.0, seed=2)


def test_first_token_follows_the_model(draw, model):
    """Over many draws the first token has the probabilities that a full pass gives it."""
    logits = full_logits(model, [PROMPTS[0]])[0][-1].astype(np.float64)
    likely = np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()
    firsts = [new[0] for seed in range(200) for new in draw([PROMPTS[0]] * 2, seed=seed)]
    seen = np.bincount(firsts, minlength=61) / len(firsts)
    spread = np.sqrt(likely * (1 - likely) / len(firsts))
    assert likely.max() > 0.05  # peaked enough to tell from a uniform draw
    assert np.all(np.abs(seen - likely) < 5 * spread + 1 / len(firsts))


def test_end_of_text_ends_its_row_only(draw):
    whole = draw(PROMPTS, seed=5)
    stop = next(token for token in whole[0][1:] if token not in whole[1])
    at = whole[0].index(stop)
    assert draw(PROMPTS, seed=5, end_of_text=stop) == [whole[0][:at], whole[1]]


def test_an_empty_prompt_begins_with_end_of_text(draw):
    assert draw([[], [9]], end_of_text=7, seed=1) == draw([[7], [9]], end_of_text=7, seed=1)
    with pytest.raises(UserError, match="end_of_text"):
        draw([[], [9]])


def test_no_prompts_no_work(draw):
    assert draw([]) == []


def test_compiles_once_per_shape(model, monkeypatch):
    chex.clear_trace_counter()
    traced = jax.jit(chex.assert_max_traces(sample._placed, n=2), static_argnames=("graph", "tokens", "mesh"))
    monkeypatch.setattr(sample, "generate_padded", traced)
    for length in (1, 20, 32):  # one bucket
        for options in ({}, {"seed": 1}, {"temperature": 0.0}, {"top_p": 0.5}, {"progress": 0.5}):
            generate(model, [[3] * length, [4]], tokens=4, **options)
    generate(model, [[3] * 33, [4]], tokens=4)  # the next one
    with pytest.raises(AssertionError, match="2 times"):
        generate(model, [[3], [4]], tokens=5)


@pytest.mark.parametrize(
    ("field", "prompts", "options"),
    [
        ("prompt", [[1] * 41], {}),
        ("prompt", [[1], [61]], {}),
        ("prompt", [[-1]], {}),
        ("tokens", [[1]], {"tokens": 48}),
        ("tokens", [[1]], {"tokens": 0}),
        ("temperature", [[1]], {"temperature": -0.1}),
        ("temperature", [[1]], {"temperature": float("nan")}),
        ("top_p", [[1]], {"top_p": 0.0}),
        ("top_p", [[1]], {"top_p": 1.1}),
        ("seed", [[1]], {"seed": -1}),
    ],
)
def test_bad_input_names_the_field(model, field, prompts, options):
    with pytest.raises(UserError) as error:
        generate(model, prompts, **({"tokens": 8} | options))
    assert error.value.field == field


def test_a_prompt_too_long_says_by_how_much(model):
    with pytest.raises(UserError) as error:
        generate(model, [[1], [2] * 45], tokens=8)
    assert error.value.value == "45 tokens"
    for number in ("48", "40 tokens", "at most 3 new"):
        assert number in error.value.fix
