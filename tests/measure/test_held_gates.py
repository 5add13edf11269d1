"""A held gate is its mean for every token; what that costs is measured on a copy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.layers.config import MoEConfig
from nagjax.measure.held_gates import gate_means, held, held_losses, holds
from nagjax.mod import ModConfig
from nagjax.residual import find_scheme
from nagjax.train.loss import cross_entropy
from tests import tiny
from tests.tiny import blueprint, fresh, moved, packed_batch, run_config
from tests.tolerance import assert_close

GATED = ("nag", "review", "review_low_rank", "highway")
BATCHES = [packed_batch(seed) for seed in (0, 1)]


@functools.cache
def model_of(name, **changes):
    scheme = find_scheme("review")(rank=2) if name == "review_low_rank" else find_scheme(name)()
    plan = blueprint(run_config(scheme, **changes))
    return plan.model(moved(fresh(plan).params))


@nnx.jit
def gates(model, batch):
    """Of every sublayer, for all tokens [S, B, T, G]."""

    def intervene(model, stream, call):
        first, second = model.sublayers(stream, *call)
        return second.stream, jnp.stack([first.gate, second.gate])

    seen = model(batch.tokens, batch.where, intervene=intervene).seen
    return seen.reshape(-1, *seen.shape[2:])


@pytest.mark.parametrize("name", GATED)
def test_held_gates_are_the_mean_whatever_the_token(name):
    model = model_of(name)
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    means = np.asarray(gate_means(model, BATCHES))
    # The other way: all gates, kept whole.
    whole = [np.asarray(gates(model, batch), np.float64) for batch in BATCHES]
    counted = [np.asarray(batch.counted) for batch in BATCHES]
    every = np.concatenate([own[:, real] for own, real in zip(whole, counted, strict=True)], axis=1)
    assert_close(means, every.mean(axis=1), **tiny.FORWARD)
    assert np.all(every.std(axis=1) > 1e-3)  # there is something to hold
    fixed = np.asarray(gates(held(model, jnp.asarray(means)), packed_batch(7)))
    assert_close(fixed, np.broadcast_to(means[:, None, None], fixed.shape), **tiny.FORWARD)
    jax.tree.map(np.testing.assert_array_equal, before, nnx.to_pure_dict(nnx.state(model)))


def test_tokens_whose_experts_all_did_nothing_met_no_gate():
    """A new Review model's gates are one half, whatever they read."""
    experts = MoEConfig(experts=2, active=1, weights="score", skips=2)
    plan = blueprint(run_config(find_scheme("review")(), moe=experts))
    model = plan.model(fresh(plan).params)
    assert np.any(np.asarray(gates(model, BATCHES[0])) == 0)
    assert_close(gate_means(model, BATCHES), np.float32(0.5), **tiny.FORWARD)


def test_losses_by_batch_with_and_without_channels_of_their_own():
    nag, review = (held_losses(model_of(name), BATCHES, [packed_batch(5), packed_batch(6)]) for name in GATED[:2])
    assert set(nag) == {"whole", "mean"} and set(review) == {"whole", "mean", "one_mean"}
    for found in (nag, review):
        assert all(len(losses) == 2 and np.all(np.isfinite(losses)) for losses in found.values())
        assert len({tuple(losses) for losses in found.values()}) == len(found)


def test_the_means_are_of_training_text_and_the_losses_of_another():
    """One mean of a gate is that over its channels. Parameters are so large that gates are far from one another."""
    plan = blueprint(run_config(find_scheme("review")()))
    model, batch = plan.model(moved(fresh(plan).params, 0.5)), packed_batch(5)
    means = np.asarray(gate_means(model, BATCHES))
    one = np.repeat(means.mean(axis=1, keepdims=True), means.shape[1], axis=1)
    models = {"whole": model, "mean": held(model, jnp.asarray(means)), "one_mean": held(model, jnp.asarray(one))}
    for name, (loss,) in held_losses(model, BATCHES, [batch]).items():
        sums = cross_entropy(logits(models[name], batch), batch)
        assert_close(loss, float(sums.nats / sums.count), **tiny.FORWARD)


@nnx.jit
def logits(model, batch):
    return model.logits(model(batch.tokens, batch.where))


def test_which_models_can_be_held():
    assert not holds(model_of("plain"))
    assert holds(model_of("nag")) and not holds(model_of("nag", mod=ModConfig(rate=(0.5,))))
