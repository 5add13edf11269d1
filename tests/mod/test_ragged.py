"""Padding in short rows and filler rows is no text, so no mean, threshold or loss may count it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.mod import ModConfig, kept
from nagjax.residual import find_scheme
from nagjax.train.evaluator import Evaluator, with_causal
from nagjax.train.loss import Batch, Sums
from nagjax.train.safety.guard import new_guard
from nagjax.train.state import TrainState
from nagjax.train.step import Cuts, EvalSums, _averaged, jit_eval_step, train_step
from tests import tiny
from tests.mod.routing_models import make, masked_reference, run
from tests.tolerance import assert_close, close_to

HALF = ModConfig(rate=(0.5,))
K = kept(0.5, tiny.TOKENS)
LENGTHS = (8, 8, 6, 2, 4, 7, 0, 0)  # of the rows; K of them are needed for a cut


def ragged(seed: int = 0, lengths: tuple[int, ...] = LENGTHS) -> Batch:
    """No token occurs twice in a row, since equal tokens tie. Not every token's target counts."""
    batch, noise = tiny.packed_batch(seed, len(lengths)), np.random.default_rng(seed)
    place = np.arange(tiny.TOKENS)
    segments = (place < np.array(lengths)[:, None]).astype(np.int32)
    tokens = np.stack([noise.permutation(tiny.VOCAB)[: tiny.TOKENS] for _ in lengths]).astype(np.int32)
    weights = segments * noise.integers(0, 2, segments.shape)
    positions = np.broadcast_to(place, segments.shape).astype(np.int32)
    return Batch(tokens, batch.targets, segments, positions, weights.astype(np.float32))


def config(name="nag", mod=HALF, **options):
    return tiny.run_config(find_scheme(name)(), mod=mod, **options)


@functools.cache
def mapped(name: str, mod: ModConfig):
    """A model, its output on the ragged batch, tokens that ran [S, B, T], scores [S, B, T] and real tokens, float64."""
    model, batch = make(find_scheme(name)(), mod), ragged()
    output, _ = run(model, batch, mapped=True, observed=True, cuts=jnp.full(6, 0.3))
    ran = np.asarray(output.paths["ran"])
    _, scores = masked_reference(model, batch, ran)
    return model, jax.device_get(output), ran, scores.astype(np.float64), batch.segment_ids > 0


@functools.cache
def watched(bp, causal: bool = False):
    """The output of a model on a batch."""

    def forward(params, batch, progress, cuts=0.1):
        options = {"observed": True, "mapped": True, "cuts": jnp.broadcast_to(cuts, 6), "causal": causal}
        return bp.model(params)(batch.tokens, batch.where, progress=progress, **options)

    return jax.jit(forward)


def mean(values, real):
    return np.array([np.mean(own[real], dtype=np.float64) for own in values])


@pytest.mark.parametrize("name, mod", [("nag", HALF), ("plain", ModConfig(rate=(0.5,), decider="aux_loss"))], ids=str)
def test_means_are_over_tokens(name, mod):
    model, output, ran, scores, real = mapped(name, mod)
    routing = output.routing
    np.testing.assert_allclose(routing["executed"], mean(ran, real), atol=1e-6)
    np.testing.assert_allclose(output.telemetry["turn"], mean(output.paths["turn"], real), rtol=1e-6)
    decided = scores >= (0.3 if model.mod.decider.needs_cuts else 0.0)
    assert not np.any(np.abs(scores - 0.3)[:, real] < 1e-4)  # none so near that a rounding decides
    np.testing.assert_allclose(routing["agreement"], mean(decided == ran, real), atol=1e-6)
    if model.mod.decider.trained:
        nats = np.where(ran, np.log1p(np.exp(-scores)), np.log1p(np.exp(scores)))
        assert_close(routing["loss"], mean(nats, real), **tiny.FORWARD)
    full = np.array(LENGTHS) >= K
    cuts = [[np.sort(own[row, :n])[-K] for row, n in enumerate(LENGTHS) if n >= K] for own in scores]
    np.testing.assert_array_equal(routing["cuts"], np.full(6, full.sum()))
    assert_close(routing["cut"], np.mean(cuts, axis=1), **tiny.FORWARD)


def test_telemetry_without_padding_is_that_of_the_text_alone():
    """A filler row beside a text changes no number."""
    model = make(find_scheme("nag")(), HALF)
    alone, beside = (run(model, ragged(0, n), observed=True)[0].telemetry for n in ((8, 8), (8, 8, 0, 0)))
    for name, values in alone.items():
        assert_close(beside[name], values, **tiny.FORWARD, err_msg=name)


RULES = {
    "top-k": (HALF, False),
    "threshold": (HALF, True),
    "predictor, blocks, selected keys": (
        ModConfig(rate=(0.5,), unit="block", kv="selected", decider="predictor"),
        True,
    ),
    "one threshold": (ModConfig(rate=(0.5,), capacity="adaptive", skip="mlp"), False),
}


@pytest.mark.parametrize("rule", RULES)
def test_an_evaluation_weighs_its_batches_by_tokens(rule):
    """Over two batches, of 35 tokens and of 3: the report equals a count by hand, to 1e-6."""
    mod, causal = RULES[rule]
    bp = tiny.blueprint(config(mod=mod, train={"batch": 8}))
    evaluator = object.__new__(Evaluator)
    evaluator.token_bytes, evaluator.step = [jnp.ones(tiny.VOCAB)], jit_eval_step(bp, causal=causal)
    evaluator.names, evaluator.shares = ("",), (1.0,)
    params, forward = tiny.moved(tiny.fresh(bp).params), watched(bp, causal)
    text, cut = [ragged(0), ragged(1, (3, 0, 0, 0, 0, 0, 0, 0))], 0.1
    if "threshold" in rule:  # somewhere among the scores
        cuts = watched(tiny.blueprint(config(train={"batch": 8})))(params, text[0], 0.5).routing["cut"]
        cut = float(jnp.median(cuts))
    scores, depth = evaluator(params, {"cuts": jnp.full(6, cut)}, 50, text)
    counts, seen = [], []
    for batch in text:
        output = jax.device_get(forward(params, batch, 0.5, cut))
        real = batch.segment_ids > 0
        counts.append(real.sum())
        seen.append((mean(output.paths["ran"], real), mean(output.paths["turn"], real), output.routing["agreement"]))
    ran, turn, agreement = (np.average([s[i] for s in seen], axis=0, weights=counts) for i in (0, 1, 2))
    np.testing.assert_allclose(depth["executed"], ran, atol=1e-6)
    np.testing.assert_allclose(depth["agreement"], agreement, atol=1e-6)
    assert_close(depth["turn"], turn, **tiny.FORWARD)
    for name, part in {"mod_rate": ran, "mod_rate_attention": ran[::2], "mod_rate_mlp": ran[1::2]}.items():
        assert scores[name] == pytest.approx(1 - part.mean(), abs=1e-6)
    assert counts == [35, 3] and 0.05 < ran[1::2].mean() < 0.95
    if rule == "top-k":
        assert abs(np.mean([s[0] for s in seen]) - ran.mean()) > 0.05


@pytest.mark.parametrize("last", [0.99999994, 1.0])
def test_agreement_is_of_routed_sublayers_alone_however_their_shares_are_rounded(last):
    """Blocks 1 and 3 run all tokens, which a mean over batches of 256 and 11 tokens may tell as a little less."""

    def step(*_):
        share = np.float32([last, last, 0.5, 0.5, last, last])
        routing = {"executed": share, "agreement": np.where(share < 0.9, np.float32(0.75), np.float32(1.0))}
        return EvalSums(Sums(*np.ones(4)), 1.0, next(tokens), {"log_norm": zero, "growth": zero}, routing)

    zero = np.zeros(6)
    evaluator = object.__new__(Evaluator)
    evaluator.token_bytes, evaluator.step, evaluator.names, evaluator.shares = [jnp.ones(1)], step, ("",), (1.0,)
    tokens = iter([256.0, 256.0, 256.0, 11.0] * 2)
    scores, depth = with_causal(*(evaluator({}, {}, 1, [ragged()] * 4) for _ in range(2)))
    assert scores["agreement"] == pytest.approx(0.75) and scores["mod_rate"] == pytest.approx(1 / 6)
    assert depth["executed"][0] == 1.0 == depth["causal_executed"][-1]


def test_a_threshold_outlives_short_rows():
    """A batch without any row that has a cut, one with some, none again, then a usual one; in two parts each."""
    bp = tiny.blueprint(config(train={"accumulate": 2}))
    step, forward, state, cuts = jax.jit(train_step(bp)), watched(bp), tiny.fresh(bp), []
    assert np.all(state.mod["cuts"] == -np.inf)
    for lengths in ((2,) * 8, LENGTHS, (3, 0, 0, 0, 0, 0, 0, 0), (8,) * 8):
        batch = ragged(len(cuts), lengths)
        found = forward(state.params, batch, state.step / 100).routing["cut"]
        state, _ = step(state, batch)
        cuts.append((np.asarray(state.mod["cuts"]), np.asarray(found)))
    (none, _), (first, seen), (same, _), (last, then) = cuts
    assert np.all(none == -np.inf) and np.array_equal(same, first)
    assert_close(first, seen, **tiny.FORWARD)
    assert_close(last, 3 / 13 * first + 10 / 13 * then, **tiny.FORWARD)


@pytest.mark.parametrize("steps", [0, 5])
@pytest.mark.parametrize("broken", [-np.inf, np.nan])
def test_a_broken_threshold_heals(broken, steps):
    """As older runs saved it, and as a run that starts from one finds it: at a decay of 0, and at later steps."""
    guard = new_guard()._replace(good=jnp.int32(steps))
    state = TrainState(None, None, None, None, {"cuts": jnp.array([broken, 0.5])}, guard)
    none = _averaged(state, Cuts(jnp.zeros(2), jnp.zeros(2)), ModConfig())["cuts"]
    np.testing.assert_array_equal(none, [broken, 0.5])
    healed = _averaged(state, Cuts(jnp.full(2, 0.6), jnp.full(2, 2.0)), ModConfig())["cuts"]
    np.testing.assert_allclose(healed, [0.3, 0.3 + steps / (steps + 10) * 0.2], rtol=1e-6)


def test_a_model_without_a_threshold_runs_every_token():
    bp, batch = tiny.blueprint(config()), ragged()
    params, forward = tiny.fresh(bp).params, watched(bp, causal=True)
    for cut in (-np.inf, np.nan):
        output = forward(params, batch, 0.5, cut)
        assert np.array_equal(output.paths["ran"], np.broadcast_to(batch.segment_ids > 0, (6, 8, 8)))


def test_the_auxiliary_loss_is_the_whole_batchs_mean():
    """Parts have 16, 8, 11 and 0 tokens, and as many targets as chance gave them; its gradient rules this batch's."""
    mod, found = ModConfig(rate=(0.5,), decider="aux_loss", aux_weight=30.0), []
    order = np.array([0, 2, 4, 6, 1, 3, 5, 7])  # the rows of a part are those n apart
    batch = jax.tree.map(lambda x: x[order], ragged())
    for accumulate in (1, 4):
        bp = tiny.blueprint(config("plain", mod, train={"accumulate": accumulate}, optimizer={"clip": 1e9}))
        state = tiny.fresh(bp)
        state, metrics = jax.jit(train_step(bp))(state._replace(params=tiny.moved(state.params)), batch)
        found.append(float(metrics.grad_norm))
    assert found[1] == close_to(found[0], **tiny.STEP)
    assert found[0] > 4.0  # the language model's is 1
