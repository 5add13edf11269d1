"""A pass with the cache computes what a pass without it computes, for every kind of stream."""

import jax
import numpy as np
import pytest

from nagjax.errors import UserError
from nagjax.generate.sample import generate
from nagjax.layers.config import BlockConfig, MoEConfig, OtherBlocks, RopeConfig
from nagjax.layers.where import Where
from nagjax.mod import ModConfig
from nagjax.residual.registry import schemes
from nagjax.residual.schemes.nag import NAG
from nagjax.residual.schemes.plain import Plain
from tests import tiny
from tests.jaxprs import equations
from tests.streams import one_per_layout, one_per_stream
from tests.tiny_models import full_logits, make_model, stepwise_logits
from tests.tolerance import assert_close

PROMPTS = [[5, 1, 60, 3, 3, 17, 8], [9], [2, 40, 7]]
BEGUN = {
    "dense": {},
    "window": {"block": BlockConfig(window=4)},
    "limited logits": {"block": BlockConfig(softcap=1.0)},
    "compressed": {"block": BlockConfig(cca=True)},
}
ROWS = np.random.default_rng(0).integers(0, 61, (3, 13)).tolist()


def assert_greedy(model, prompts, written, progress=1.0):
    """Each written token is the likeliest after what precedes it, by full passes without a cache."""
    rows = [prompt + new for prompt, new in zip(prompts, written, strict=True)]
    for prompt, new, logits in zip(prompts, written, full_logits(model, rows, progress), strict=True):
        assert np.argmax(logits, axis=-1)[len(prompt) - 1 : -1].tolist() == new


@pytest.mark.parametrize("name", one_per_stream())
def test_step_by_step_equals_one_pass(name):
    model = make_model(schemes()[name]())
    full, stepwise = full_logits(model, ROWS), stepwise_logits(model, ROWS)
    assert np.std(full) > 0.1  # else agreement would mean little
    assert_close(stepwise, full, **tiny.FORWARD)
    assert np.array_equal(np.argmax(stepwise, -1), np.argmax(full, -1))


@pytest.mark.parametrize("name", one_per_layout())
def test_greedy_equals_full_passes_for_prompts_of_different_lengths(name):
    model = make_model(schemes()[name]())
    written = generate(model, PROMPTS, tokens=9, temperature=0.0)
    assert [len(new) for new in written] == [9, 9, 9]
    assert_greedy(model, PROMPTS, written)


@pytest.mark.parametrize("attention", ["xla", "cudnn", "splash", "tokamax"])
def test_prompts_are_read_where_the_run_s_attention_is_not(attention):
    """What trains on an accelerator may be sampled here."""
    model, other = (make_model(Plain(), attention=name) for name in (attention, "auto"))
    found, expected = (begun(own, ROWS, 40)[0] for own in (model, other))
    assert np.std(expected) > 0.1
    assert_close(found, expected, **tiny.FORWARD)


@pytest.mark.parametrize("change", BEGUN.values(), ids=BEGUN)
def test_a_pass_that_begins_a_cache_is_the_model_s_own_and_multiplies_no_free_slots(change):
    model = make_model(Plain(), **change)
    logits, program = begun(model, ROWS, 40)
    assert_close(logits, full_logits(model, ROWS), **tiny.FORWARD)
    shapes = {v.aval.shape for equation in equations(program.jaxpr) for v in equation.outvars}
    assert not [shape for shape in shapes if shape[-2:] == (13, 40)] and any(40 in shape for shape in shapes)


def test_a_cache_of_fewer_places_than_tokens_is_refused():
    with pytest.raises(UserError, match="cache = 12: .* at least 13"):
        make_model(Plain())(np.asarray(ROWS), cache=12)


def told(*rows: tuple[int, ...]) -> np.ndarray:
    return np.asarray(rows, np.int32)


@pytest.mark.parametrize("change", [BEGUN["dense"], BEGUN["compressed"]], ids=["dense", "compressed"])
def test_padding_takes_no_slot_and_a_row_of_padding_waits(change):
    """Rows of text have their padding at position 0, where their first token is."""
    model, rows = make_model(Plain(), **change), np.asarray(ROWS)[:2, :7]
    full = full_logits(model, rows.tolist())
    real = told((1, 1, 1, 1, 1), (1, 1, 1, 0, 0))
    read = model(rows[:, :5], Where(real, real * told((0, 1, 2, 3, 4))), cache=12)
    waits = model(rows[:, 5:6], Where(told((1,), (0,)), told((5,), (0,))), cache=read.cache)
    last = model(told((rows[0, 6],), (rows[1, 3],)), Where(told((1,), (1,)), told((6,), (3,))), cache=waits.cache)
    assert_close(model.logits(waits)[0, 0], full[0][5], **tiny.FORWARD)
    assert_close(model.logits(last)[:, 0], [full[0][6], full[1][3]], **tiny.FORWARD)


@pytest.mark.parametrize(
    ("segments", "positions", "message"),
    [
        ((2, 2, 2), (0, 1, 2), "where.segments = 2: a row of a cache is one document"),
        ((1, 1, 2), (0, 1, 0), "where.segments = 2: a row of a cache is one document"),
        ((1, 1, 1), (3, 4, 5), "where.positions = 3: a row of a cache begins at position 0"),
        ((1, 1, 1), (0, 1, 8), "where.positions = 8: the cache holds the positions 0 to 7"),
        ((0, 0, 0), (9, 9, 9), ""),
        ((0, 1, 1), (0, 0, 1), ""),
    ],
)
def test_what_a_cache_cannot_hold_is_refused(segments, positions, message):
    model, where = make_model(Plain()), Where(told(segments), told(positions))
    run = lambda: jax.eval_shape(lambda: model(np.asarray(ROWS)[:1, :3], where, cache=8).hidden)  # noqa: E731
    if not message:
        assert run().shape == (1, 3, 32)
        return
    with pytest.raises(UserError, match=message):
        run()


@pytest.mark.parametrize("kv", ["all", "selected"])
@pytest.mark.parametrize("change", [{}, {"block": BlockConfig(cca=True)}], ids=["plain", "compressed"])
def test_blocks_without_attention_have_no_slots(kv, change):
    if change and kv == "selected":
        pytest.skip("refused")
    model = make_model(Plain(), mod=ModConfig(attention_rate=(1.0, 0.0), kv=kv), **change)
    (first,), (second,) = model.empty_cache(3, 40)
    assert first.keys.size == first.values.size == 0 and second.keys.shape[3] == 40
    written = stepwise_logits(model, ROWS)
    assert_close(written, [model.logits(model(np.asarray(ROWS)))[i] for i in range(3)], **tiny.FORWARD)


def begun(model, rows, slots: int):
    """Logits of a pass that begins a cache of so many slots, and its jaxpr."""
    run = lambda tokens: model.logits(model(tokens, cache=slots))  # noqa: E731
    return jax.jit(run)(np.asarray(rows)), jax.make_jaxpr(run)(np.asarray(rows))


def test_learned_positions_and_a_prompt_that_fills_the_context():
    model = make_model(Plain(), positions="learned", mlp="gelu", tied=True)
    prompts = [list(range(39)), [9], [2, 40, 7]]
    assert_greedy(model, prompts, generate(model, prompts, tokens=9, temperature=0.0))


WINDOWS = BlockConfig(
    window=4, softcap=1.0, others=OtherBlocks((1,), None, "own", 50.0, RopeConfig("yarn", 2.0, 1.0, 4.0, 16))
)
NO_ROTARY = BlockConfig(others=OtherBlocks((0,), 5, "none"), rope=RopeConfig("yarn", 2.0, 1.0, 4.0, 16, 1.2))


@pytest.mark.parametrize("block", [WINDOWS, NO_ROTARY], ids=["windows", "no_rotary"])
def test_blocks_that_differ_and_limited_logits(block):
    model = make_model(Plain(), logit_softcap=2.0, mlp="geglu", block=block)
    full, stepwise = full_logits(model, ROWS), stepwise_logits(model, ROWS)
    assert np.std(full) > 0.1
    assert_close(stepwise, full, **tiny.FORWARD)
    assert_greedy(model, PROMPTS, generate(model, PROMPTS, tokens=9, temperature=0.0))


def test_experts_drop_nothing_when_sampling():
    """This holds for every capacity in training."""
    moe = MoEConfig(4, 2, shared=1, hidden=16, dispatch="capacity", capacity=0.25)
    model = make_model(NAG(), moe=moe)
    full, stepwise = full_logits(model, ROWS), stepwise_logits(model, ROWS)
    assert_close(stepwise, full, **tiny.FORWARD)
    trained = jax.jit(lambda rows: model.logits(model(rows)))(np.asarray(ROWS))
    assert np.max(np.abs(trained - np.stack(full))) > 0.1
    assert_greedy(model, PROMPTS, generate(model, PROMPTS, tokens=9, temperature=0.0))


def test_progress_reaches_the_scheme():
    model = make_model(NAG())
    written = generate(model, PROMPTS, tokens=9, temperature=0.0, progress=0.01)
    assert_greedy(model, PROMPTS, written, progress=0.01)
    assert written != generate(model, PROMPTS, tokens=9, temperature=0.0)


def test_bfloat16_stays_close():
    model = make_model(NAG(), dtype="bfloat16")
    full, stepwise = np.array(full_logits(model, ROWS)), np.array(stepwise_logits(model, ROWS))
    # A few roundings (2**-8 relative each) in another order: measured against the spread of the logits.
    assert np.sqrt(np.mean((stepwise - full) ** 2)) < 0.02 * np.std(full)
    written = generate(model, PROMPTS, tokens=9, temperature=0.0)
    rows = [prompt + new for prompt, new in zip(PROMPTS, written, strict=True)]
    for prompt, new, logits in zip(PROMPTS, written, full_logits(model, rows), strict=True):
        logits = logits[len(prompt) - 1 : -1]
        assert np.all(logits.max(-1) - logits[np.arange(9), new] < 0.1 * np.std(logits))
