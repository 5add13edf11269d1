"""Adaptive depth: the threshold finds and holds its rate, and the tokens that run are those of the causal rule."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.data import DataConfig, batches, open_dataset
from nagjax.errors import UserError
from nagjax.layers.platform import platform, tracing_for
from nagjax.layers.where import Where
from nagjax.mod import ModConfig, adaptive
from nagjax.model.transformer import Transformer
from nagjax.residual import find_scheme
from nagjax.train.loss import Batch
from nagjax.train.step import jit_train_step
from tests import tiny
from tests.mod.routing_models import make
from tests.tolerance import assert_close, close_to

CASES = {  # with a threshold among the scores
    "sublayers, probabilities": ("plain", ModConfig(rate=(0.5,), capacity="adaptive", router="skip_class"), 0.57),
    "blocks, selected keys": ("nag", ModConfig(rate=(0.5,), capacity="adaptive", unit="block", kv="selected"), 0.8),
}


@functools.cache
def passes(case: str):
    """The training pass and the causal one on a batch with padding: loss, gradients, logits and which tokens ran."""
    name, mod, cut = CASES[case]
    model, batch = make(find_scheme(name)(), mod, depth=2), tiny.packed_batch()
    graph, params = nnx.split(model)
    cuts = jnp.full(4, cut)

    @functools.partial(jax.jit, static_argnums=1)
    def run(params, causal):
        def loss(params):
            model = nnx.merge(graph, params)
            output = model(batch.tokens, batch.where, cuts=cuts, causal=causal, mapped=True)
            logits = model.logits(output)
            mean = jnp.sum(batch.weights[..., None] * jax.nn.log_softmax(logits) ** 2) / jnp.sum(batch.weights)
            return mean, (logits, output.paths["ran"], output.routing)

        return jax.value_and_grad(loss, has_aux=True)(params)

    return batch, [jax.device_get(run(params, causal)) for causal in (False, True)]


@pytest.mark.parametrize("case", CASES)
def test_training_runs_what_sampling_runs(case):
    """The same tokens, logits and gradients as by computing all and keeping those that score above."""
    batch, (((loss, (logits, ran, routing)), grads), ((want, (wanted, let_in, _)), true)) = passes(case)
    real = batch.segment_ids > 0
    assert 0.2 < ran[:, real].mean() < 0.8 and not ran[:, ~real].any()
    np.testing.assert_array_equal(ran, let_in)
    assert_close(logits[real], wanted[real], **tiny.FORWARD)
    assert loss == close_to(want, **tiny.FORWARD)
    chained = jax.tree.leaves(jax.tree.map(lambda a, b: (np.abs(a - b).max(), np.abs(b).max()), grads, true))
    assert np.max(chained[::2]) < 2e-4 * np.max(chained[1::2]) and np.max(chained[1::2]) > 1e-3
    for own, other in zip(*(jax.tree.leaves(_routing(own)) for own in (grads, true)), strict=True):
        assert_close(own, other, **tiny.FORWARD)
        assert np.abs(own).max() > 1e-5
    fits = np.array(adaptive.sizes(tiny.TOKENS))
    most = ran.sum(axis=-1).max(axis=-1)
    np.testing.assert_allclose(routing["computed"], fits[np.searchsorted(fits, most)] / tiny.TOKENS)
    np.testing.assert_allclose(routing["executed"], ran[:, real].mean(axis=1), atol=1e-6)


def _routing(grads):
    """The gradients of the routers that have parameters."""
    blocks = nnx.to_pure_dict(grads)["blocks"]
    return [blocks[kind].get("routing", {}).get("router", {}) for kind in ("attention", "mlp")]


def test_sizes():
    assert adaptive.sizes(8) == (0, 2, 4, 6, 8) and adaptive.sizes(3) == (0, 1, 2, 3)
    assert adaptive.sizes(1024)[-1] == 1024


def test_a_switch_has_the_gradients_of_its_branch():
    branches = [lambda x: x[0] * 2, lambda x: jnp.sin(x[0]) * x[1], lambda x: x[0] * x[1] ** 2]
    operands = jnp.linspace(0.0, 1.0, 5), jnp.arange(5, dtype=jnp.float32), jnp.arange(3)
    for i, branch in enumerate(branches):
        got = jax.vjp(lambda x, y, i=i: adaptive.switch(jnp.int32(i), branches, (x, y, operands[2])), *operands[:2])
        want = jax.vjp(lambda x, y, branch=branch: branch((x, y)), *operands[:2])
        assert_close((got[0], got[1](got[0])), (want[0], want[1](want[0])), terms=4)


def test_the_backward_pass_of_a_switch_is_traced_as_its_forward_pass():
    seen = []

    def branch(x):
        seen.append(platform())
        return x * x

    def loss(x):
        with tracing_for("tpu"):
            return jnp.sum(adaptive.switch(jnp.int32(0), [branch, branch], x))

    jax.make_jaxpr(loss)(jnp.ones(3))
    assert (forward := len(seen)) and {*seen} == {"tpu"}
    jax.make_jaxpr(jax.grad(loss))(jnp.ones(3))
    assert len(seen) > 2 * forward and {*seen} == {"tpu"}


@pytest.mark.parametrize("rate, drift", [(0.3, 0.0), (0.3, 0.01), (0.125, -0.01), (0.75, 0.02)])
def test_the_rate_is_held_while_scores_drift(rate, drift):
    """Scores of eight sublayers of unequal scale, which all grow or fall by a percent or two a step."""
    noise = np.random.default_rng(0)
    step = jax.jit(functools.partial(adaptive.controlled, rate=rate))
    control = adaptive.Control(jnp.float32(-jnp.inf), jnp.float32(0.0))
    skipped = []
    for t in range(200):
        scores = np.exp(drift * t) * 0.2 * np.arange(1, 9)[:, None] ** -0.5 * noise.lognormal(0, 0.3, (8, 128))
        above = (scores[..., None] >= np.asarray(adaptive.grid(control.cut))).sum((0, 1))
        ran = (scores >= np.asarray(control.cut)).sum()
        skipped.append(1 - ran / scores.size)
        control = step(control, adaptive.Pool(*map(jnp.float32, (above, ran, scores.size))))
    assert skipped[0] == 0.0
    assert np.mean(skipped[5:]) == pytest.approx(rate, abs=0.005)
    assert np.std(skipped[20:]) < 0.03
    assert abs(float(control.debt)) < 1


def test_nothing_is_learned_from_a_batch_without_text():
    control = adaptive.Control(jnp.float32(0.3), jnp.float32(0.1))
    same = adaptive.controlled(control, adaptive.Pool(jnp.zeros(adaptive.GRID), jnp.zeros(()), jnp.zeros(())), 0.5)
    assert float(same.cut) == pytest.approx(0.3) and float(same.debt) == pytest.approx(0.1)


def test_training_on_text_holds_the_rate():
    """A hundred steps: the average over all sublayers and tokens within half a point, sublayers unlike each other. The
    rate of a step is that counted by hand, short rows and two parts included, and one program serves all sizes."""
    mod = ModConfig(rate=(0.3,), capacity="adaptive", skip="mlp")
    given = dict(depth=2, width=16, context=16, vocab=257, train=dict(batch=16, steps=100, accumulate=2))
    bp = tiny.blueprint(tiny.run_config(find_scheme("nag")(), mod=mod, **given))
    step, state, text = (
        jit_train_step(bp),
        tiny.fresh(bp),
        batches(open_dataset(DataConfig(), split="train"), batch=16, context=16),
    )

    @jax.jit
    def ran(params, cuts, batch, progress):
        return bp.model(params)(batch.tokens, batch.where, cuts=cuts, progress=progress, mapped=True).paths["ran"]

    rates = []
    for done in range(100):
        batch = Batch(**next(text))
        if done == 50:  # most rows are short, two are filler
            lengths = np.array([16, 16, 9, 5, 4, 3, 3, 2, 2, 2, 1, 1, 1, 1, 0, 0])[:, None]
            batch = batch._replace(segment_ids=batch.segment_ids * (np.arange(16) < lengths))
            by_hand = np.asarray(ran(state.params, state.mod["cuts"], batch, done / 100))[1::2, batch.segment_ids > 0]
        state, metrics = step(state, batch)
        rates.append(float(metrics.mod_rate))
    assert rates[50] == pytest.approx(1 - by_hand.mean(), abs=1e-6)
    assert rates[0] == 0.0 and np.mean(rates[3:]) == pytest.approx(0.3, abs=0.005)
    assert len(set(np.asarray(state.mod["cuts"]))) == 1 and step._cache_size() == 1
    own = 1 - np.asarray(ran(state.params, state.mod["cuts"], Batch(**next(text)), 1.0))[1::2].mean((1, 2))
    assert abs(own[0] - own[1]) > 0.05


@pytest.mark.parametrize(
    "options, message",
    [
        ({"rate": (0.2, 0.3)}, "mod.rate.*one threshold has one rate"),
        ({"mlp_rate": (0.2,)}, "mod.mlp_rate.*--mod.capacity fixed"),
        ({"decider": "predictor"}, "mod.decider.*--mod.capacity fixed"),
    ],
)
def test_what_one_threshold_cannot_do(options, message):
    with pytest.raises(UserError, match=message):
        ModConfig(**{"rate": (0.2,), "capacity": "adaptive"} | options)


def test_scores_that_do_not_compare_are_refused():
    config = tiny.model_config(mod=ModConfig(rate=(0.5,), capacity="adaptive"))
    with pytest.raises(UserError, match="mod.capacity.*linear.*--mod.router random, skip_class"):
        Transformer(config, find_scheme("plain")(), nnx.Rngs(0))
    model = Transformer(config, find_scheme("nag")(), nnx.Rngs(0))
    with pytest.raises(UserError, match="no thresholds"):
        model(jnp.zeros((1, 8), jnp.int32), Where.whole(1, 8))
    assert model.mod.room(0.5) == tiny.TOKENS
