"""Properties of generate other than correct logits: seeds, stopping, compilation, errors."""

import jax
import numpy as np
import pytest
from flax import nnx

from nagjax.errors import UserError
from nagjax.generate import batching, decode
from nagjax.generate.batching import window_start
from nagjax.generate.sample import cut, generate
from nagjax.mod import ModConfig
from nagjax.residual.schemes.plain import Plain
from nagjax.runs.config import MeshConfig
from nagjax.train.distributed.mesh import make_mesh, replicated
from tests.tiny_models import full_logits, make_model

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
    never = next(i for i in range(61) if i not in whole[0] + whole[1])
    assert draw(PROMPTS, seed=5, end_of_text=never, ends=(stop,)) == [whole[0][:at], whole[1]]
    assert draw(PROMPTS, seed=5, end_of_text=never, ends=iter([stop])) == [whole[0][:at], whole[1]]
    with pytest.raises(UserError, match="ends = 61"):
        draw(PROMPTS, ends=(61,))


def test_an_empty_prompt_begins_with_end_of_text(draw):
    assert draw([[], [9]], end_of_text=7, seed=1) == draw([[7], [9]], end_of_text=7, seed=1)
    with pytest.raises(UserError, match="end_of_text"):
        draw([[], [9]])


def test_prompts_of_one_length_may_be_an_array(draw):
    assert draw(np.array([[5, 1], [9, 60]]), seed=1) == draw([[5, 1], [9, 60]], seed=1)


def test_prompts_may_come_from_an_iterator(draw):
    assert draw(iter(PROMPTS), seed=3) == draw(PROMPTS, seed=3)


def test_no_prompts_no_work(draw):
    assert draw([]) == []


def test_compiles_once_per_shape(model):
    programs = lambda: (decode.read._cache_size(), decode.write._cache_size())  # noqa: E731
    generate(model, [[3], [4]], tokens=4)
    reads, writes = programs()
    for length in (1, 20, 32):  # one bucket
        for options in ({}, {"seed": 1}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}, {"progress": 0.5}):
            generate(model, [[3] * length, [4]], tokens=5, **options)
    assert programs() == (reads, writes), "nor for another number of tokens"
    generate(model, [[3] * 33, [4]], tokens=4)  # each row by itself, for they are no longer alike
    assert programs() == (reads + 2, writes)


def test_filters_of_one_token_are_greedy(draw):
    want = draw(PROMPTS, temperature=0.0)
    assert draw(PROMPTS, top_k=1) == want == draw(PROMPTS, min_p=1.0)


def test_rows_of_different_lengths_are_read_apart_and_written_together(model, monkeypatch):
    """Short texts are not padded to the longest one, and what each row writes is what it would write alone."""
    seen = []
    read = batching.read

    def watched(params, texts, *rest, **own):
        seen.append(texts.shape)
        return read(params, texts, *rest, **own)

    monkeypatch.setattr(batching, "read", watched)
    prompts = [[7] * 40, [5, 1, 60], [8] * 33, [9]]
    written = generate(model, prompts, tokens=8, seed=2)
    assert seen == [(2, 32), (2, 48)]
    for i in (1, 2):
        alone = [[1]] * i + [prompts[i]]  # what row i draws is the row's
        assert generate(model, alone, tokens=8, seed=2)[i] == written[i]


def test_rows_that_are_done_leave_the_batch(model, monkeypatch):
    """Six of eight rows end after one token: the other two continue as a batch of two, with the same tokens."""
    monkeypatch.setattr(batching, "OFTEN", 2)
    sizes, write = [], batching.write

    def counted(params, rows, at, *rest, **own):
        sizes.append(len(at))
        return write(params, rows, at, *rest, **own)

    monkeypatch.setattr(batching, "write", counted)
    prompts = [[i + 1, 5] for i in range(8)]
    whole = generate(model, prompts, tokens=8, seed=4)
    sizes.clear()
    fewer = generate(model, prompts, tokens=8, seed=4, finished=lambda row, new: row not in (2, 5))
    assert sizes == [8, 2, 2, 2]
    assert [fewer[2], fewer[5]] == [whole[2], whole[5]] and fewer[0] == whole[0][:2]


def by_full_passes(model, prompt, tokens):
    """Greedy continuation in a sliding window, each token by a pass without a cache."""
    ids, context = list(prompt), model.config.context
    for _ in range(tokens):
        window = ids[window_start(len(ids), context) :]
        assert len(window) <= context
        ids.append(int(np.argmax(full_logits(model, [window])[0][-1])))
    return ids[len(prompt) :]


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_text_beyond_the_context_is_seen_through_a_window(positions):
    model = make_model(Plain(), positions=positions)
    noise = np.random.default_rng(0)
    prompts = [noise.integers(0, 61, length).tolist() for length in (3, 47, 48, 49, 130)]
    written = generate(model, prompts, tokens=60, temperature=0.0, slide=True)
    for prompt, new in zip(prompts, written, strict=True):
        assert new == by_full_passes(model, prompt, 60)


def test_a_bias_of_the_head_counts():
    model = nnx.clone(make_model(Plain(), head_epsilon=1e-5))
    model.transform.table_bias[...] = np.random.default_rng(1).normal(0.0, 3.0, 61).astype(np.float32)
    assert generate(model, [[5, 3]], tokens=4, temperature=0.0) == [by_full_passes(model, [5, 3], 4)]


def test_the_window_follows_from_the_number_of_tokens():
    seen = [n - window_start(n, 48) for n in range(1, 200)]
    assert seen[:48] == list(range(1, 49)) and seen[48:72] == list(range(25, 49)) == seen[72:96]
    assert [n - window_start(n, 1) for n in (1, 2, 3)] == [1, 1, 1]
    assert [n - window_start(n, 3) for n in (3, 4, 5, 6)] == [3, 3, 3, 3]


@pytest.mark.skipif(jax.device_count() < 2, reason="one device only")
@pytest.mark.parametrize("mod", [ModConfig(), ModConfig(rate=(0.5,), router="random")])
def test_a_mesh_writes_the_same_windows_and_batches(mod):
    """Three rows on two devices, of two lengths, one of which slides. A random router draws by the row's place, so the
    copy that fills the batch would write something else."""
    model = make_model(Plain(), mod=mod)
    mesh = make_mesh(MeshConfig(), jax.devices()[:2])
    graph, params = nnx.split(model)
    spread = nnx.merge(graph, jax.device_put(params, replicated(mesh)))
    prompts, options = [[9], [2] * 45, [5, 1, 60]], {"tokens": 12, "temperature": 0.0, "slide": True}
    if mod.active:
        options["cuts"] = np.full(model.config.sublayers, 0.5, np.float32)
    assert generate(spread, prompts, **options) == generate(model, prompts, **options)


def test_cut_at_the_first_stop_text():
    assert cut("one two three", ("three", "tw")) == "one "
    assert cut("one", ("two",)) == cut("one", ()) == "one"


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
        ("top_k", [[1]], {"top_k": -1}),
        ("top_k", [[1]], {"top_k": 2.5}),
        ("min_p", [[1]], {"min_p": -0.1}),
        ("min_p", [[1]], {"min_p": 1.1}),
        ("min_p", [[1]], {"min_p": float("nan")}),
        ("tokens", [[1]], {"tokens": 0, "slide": True}),
        ("seed", [[1]], {"seed": -1}),
        ("prompts", "abc", {}),
        ("prompts", 3, {}),
        ("prompt", [1, 2], {}),
        ("prompt", ["abc"], {}),
        ("prompt", [[1.7]], {}),
        ("end_of_text", [[1]], {"end_of_text": 1000}),
        ("end_of_text", [[1]], {"end_of_text": -5}),
        ("progress", [[1]], {"progress": float("nan")}),
        ("progress", [[1]], {"progress": 5.0}),
        ("cuts", [[1]], {"cuts": np.zeros(2)}),
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
    for number in ("48", "40 tokens", "at most 3 new", "--slide"):
        assert number in error.value.fix
