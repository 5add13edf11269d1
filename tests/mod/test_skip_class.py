"""The skip-class router and the balance decider, by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nagjax.mod import ModConfig
from nagjax.mod.deciders import find_decider
from nagjax.mod.routers import find_router
from nagjax.residual import find_scheme
from tests import tiny

ROUTER = find_router("skip_class", find_scheme("plain")())
BALANCE = find_decider("balance", ROUTER)


class Plain:
    """A scheme of which only `read` is called."""

    @staticmethod
    def read(stream):
        return stream


def test_the_score_is_the_probability_of_the_class_to_run():
    from flax import nnx

    own = ROUTER.parameters(16, nnx.Rngs(0))
    own.bias[...] = jnp.array([0.3, -0.2])
    x = np.random.default_rng(0).normal(size=(2, 8, 16)).astype(np.float32)
    scores = np.asarray(ROUTER.score(Plain, jnp.asarray(x), own, None, None, None))
    logits = x.astype(np.float64) @ np.asarray(own.weight[...], np.float64).T + np.array([0.3, -0.2])
    want = np.exp(logits[..., 0]) / np.exp(logits).sum(-1)
    np.testing.assert_allclose(scores, want, rtol=1e-5)
    np.testing.assert_allclose(ROUTER.odds(jnp.asarray(scores)), logits[..., 0] - logits[..., 1], atol=1e-4)
    update = np.ones((2, 8, 16), np.float32)
    np.testing.assert_allclose(ROUTER.weigh(jnp.asarray(update), jnp.asarray(scores))[..., 3], scores)


def test_certain_scores_have_odds_and_slopes():
    odds, slopes = jax.vmap(jax.value_and_grad(ROUTER.odds))(jnp.array([0.0, 1e-30, 0.5, 1.0]))
    assert np.all(np.isfinite(odds)) and np.all(np.isfinite(slopes)) and odds[2] == 0.0 and np.all(np.diff(odds) >= 0)


def test_the_balance_loss_by_hand():
    """3 of 4 real tokens run; 2 of them would choose to. Padding counts nowhere."""
    p = np.array([[0.9, 0.6, 0.4, 0.2, 0.99]])
    chosen, real = np.array([[1, 1, 1, 0, 0]], bool), np.array([[1, 1, 1, 1, 0]], bool)
    mean = p[0, :4].mean()
    want = 0.5 * mean / 0.75 + 0.5 * (1 - mean) / 0.25
    got = BALANCE.loss(jnp.log(p / (1 - p)), jnp.asarray(chosen), jnp.asarray(real))
    np.testing.assert_allclose(got, [want], rtol=1e-6)


@pytest.mark.parametrize("length", [0, 1, 3])
def test_sequences_that_run_whole_have_a_balance_loss(length):
    real = (np.arange(4) < length)[None]
    loss, slope = jax.value_and_grad(lambda z: jnp.sum(BALANCE.loss(z, real, real)))(jnp.linspace(-1, 1, 4)[None])
    assert np.isfinite(loss) and np.all(np.isfinite(slope))


def test_the_balance_loss_brings_the_choices_to_the_rate():
    mod = ModConfig(rate=(0.25,), router="skip_class", decider="balance", aux_weight=1.0)
    bp = tiny.blueprint(tiny.run_config(find_scheme("plain")(), mod=mod))
    batch, params, seen = tiny.packed_batch(), bp.init(0).params, []
    params["blocks"]["mlp"]["routing"]["router"]["bias"] += jnp.array([-2.0, 2.0])  # nobody wants to run
    optimizer = optax.adam(0.03)

    @jax.jit
    def step(params, state):
        def loss(params):
            routing = bp.model(params)(batch.tokens, batch.where).routing
            return jnp.mean(routing["loss"]), routing["executed"]

        grads, chosen = jax.grad(loss, has_aux=True)(params)
        updates, state = optimizer.update(grads, state)
        ran = bp.model(params)(batch.tokens, batch.where, cuts=jnp.zeros(6), causal=True).routing["executed"]
        return optax.apply_updates(params, updates), state, jnp.abs(ran - chosen).mean()

    state = optimizer.init(params)
    for _ in range(80):
        params, state, off = step(params, state)
        seen.append(float(off))
    assert np.mean(seen[-5:]) < 0.15 < 0.25 < seen[0]
