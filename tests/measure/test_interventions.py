"""Interventions on a forward pass, each against a second way to compute the same."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.layers.where import Where
from nagjax.measure.damage import skip_effect
from nagjax.measure.interventions import erased, rebuilt, residual, skipping, tapped, through, without
from nagjax.mod import ModConfig
from nagjax.residual import Boundary
from nagjax.residual.registry import find_scheme, schemes
from nagjax.train.loss import cross_entropy
from tests import tiny
from tests.tiny import blueprint, created, fresh, moved, packed_batch, run_config
from tests.tolerance import assert_close

SKIPPED = 1


@functools.cache
def made(name):
    scheme = find_scheme(name)()
    return nnx.split(blueprint(run_config(scheme)).model(moved(created(scheme).params)))


def walk(graph, params, batch, intervene):
    model = nnx.merge(graph, params)
    return model(batch.tokens, batch.where, intervene=intervene)


def updates(inner):
    """Around another intervention: the residual in front of every block and behind it, of whatever that one does."""

    def intervene(model, stream, call):
        after, _ = inner(model, stream, call)
        return after, (residual(model.scheme, stream), residual(model.scheme, after))

    return intervene


@pytest.mark.parametrize("name", ["plain", "nag"])
def test_taps_tell_the_norm_of_the_gradient_at_every_depth(name):
    """The other way: the gradient of a shift of the residual, kept whole."""
    graph, params = made(name)
    batch = packed_batch()

    def loss(params, shift, meters):
        def intervene(model, stream, call):
            h = residual(model.scheme, stream) + shift[call.layer.block_index]
            return tapped(meters)(model, rebuilt(model, h, call), call)

        model = nnx.merge(graph, params)
        sums = cross_entropy(model.logits(model(batch.tokens, batch.where, intervene=intervene)), batch)
        return sums.nats / sums.count

    shift = jnp.zeros((3, *batch.tokens.shape, 16))
    by_shift, by_tap = jax.jit(jax.grad(loss, argnums=(1, 2)))(params, shift, jnp.zeros(3))
    expected = np.linalg.norm(np.asarray(by_shift, np.float64).reshape(3, -1), axis=1)
    assert_close(np.sqrt(by_tap), expected, **tiny.STEP)
    assert np.ptp(expected) > 0.01 * expected.mean()


def test_of_equal_rows_a_random_router_lets_the_same_tokens_in():
    """Up to the block that is skipped in the second half both halves are the same; there all of the update is gone."""
    bp = blueprint(run_config(find_scheme("plain")(), mod=ModConfig(rate=(0.5,), router="random")))
    batch, params = packed_batch(), moved(fresh(bp).params)

    @jax.jit
    def run(params):
        twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
        return bp.model(params)(twice.tokens, twice.where, noise=jnp.uint32(3), intervene=skipping(jnp.int32(2))).seen

    before, between, skipped = np.asarray(run(params))
    assert not before.any() and not between.any()
    assert set(np.round(skipped[batch.segment_ids > 0], 5)) == {0.0, 1.0}  # what ran nowhere has nothing to lose


def test_skip_effects_are_those_of_two_passes():
    graph, params = made("nag")
    batch = packed_batch()
    stays = np.arange(3) != SKIPPED

    @jax.jit
    def both_ways(params):
        whole, less = (walk(graph, params, batch, updates(without(jnp.asarray(s)))) for s in (stays | True, stays))
        twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
        model = nnx.merge(graph, params)
        found = model(twice.tokens, Where(twice.segment_ids, twice.positions), intervene=skipping(jnp.int32(SKIPPED)))
        change = [after - before for before, after in (whole.seen, less.seen)]
        logits = model.logits(found), jnp.concatenate([model.logits(whole), model.logits(less)])
        return found.seen, skip_effect(*change), logits

    got, expected, logits = both_ways(params)
    real = np.asarray(batch.weights) > 0
    assert_close(got[:, real], expected[:, real], **tiny.FORWARD, scale=1.0)
    assert_close(got[SKIPPED][real], 1, **tiny.FORWARD)
    assert np.all(got[SKIPPED + 1][real] > 1e-3) and not got[:SKIPPED].any()
    twice = np.concatenate([real, real])
    assert_close(logits[0][twice], logits[1][twice], **tiny.FORWARD)


def test_a_local_effect_is_that_of_one_block_s_output_alone():
    graph, params = made("plain")
    batch = packed_batch()
    whole = jax.jit(lambda p: walk(graph, p, batch, updates(without(jnp.ones(3, bool)))).seen)(params)
    before, after = whole
    missing = after[0] - before[0]

    @jax.jit
    def both_ways(params):
        def lacking(model, stream, call):
            h = residual(model.scheme, stream) - missing
            return through(model, stream, call), residual(
                model.scheme, through(model, rebuilt(model, h, call), call)
            ) - h

        twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
        where = Where(twice.segment_ids, twice.positions)
        model, intervene = nnx.merge(graph, params), skipping(jnp.int32(0), local=True)
        return model(twice.tokens, where, intervene=intervene).seen, walk(graph, params, batch, lacking).seen

    got, changed = both_ways(params)
    real = np.asarray(batch.weights) > 0
    expected = skip_effect(after - before, changed)
    assert_close(got[1:, real], expected[1:, real], **tiny.FORWARD, scale=1.0)


def test_an_effect_on_the_future_leaves_what_comes_first_alone():
    graph, params = made("plain")
    batch = packed_batch()
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
    where = Where(jnp.ones_like(twice.segment_ids), jnp.broadcast_to(jnp.arange(8), twice.tokens.shape))
    run = jax.jit(lambda p: nnx.merge(graph, p)(twice.tokens, where, intervene=skipping(jnp.int32(0), before=3)).seen)
    effect = run(params)
    assert_close(effect[0, :, :3], 1, **tiny.FORWARD)
    assert not effect[0, :, 3:].any() and np.all(effect[1:, :, 3:].max(axis=(0, 2)) > 0)


def test_erasing_makes_tokens_alike():
    graph, params = made("plain")
    batch = packed_batch()
    counted = jnp.asarray(batch.weights)
    before, _ = jax.jit(lambda p: walk(graph, p, batch, updates(without(jnp.ones(3, bool)))).seen)(params)

    def intervene(model, stream, call):
        return erased(jnp.int32(2), counted)(model, stream, call)[0], residual(model.scheme, stream)

    output = jax.jit(lambda p: walk(graph, p, batch, intervene))(params)
    np.testing.assert_array_equal(output.seen[:2], before[:2])
    hidden = np.asarray(output.hidden)[np.asarray(batch.positions) == 0]
    assert_close(hidden, np.broadcast_to(hidden[0], hidden.shape), **tiny.FORWARD)


@pytest.mark.parametrize("name", sorted(schemes()))
def test_a_stream_taken_apart_and_rebuilt_reads_the_same(name):
    scheme, rngs = find_scheme(name)(), nnx.Rngs(0)
    entry, ends = scheme.entry(16, rngs), scheme.ends(16, 1.0, rngs)
    at = Boundary(None, entry, jnp.int32(0), jnp.int32(5), jnp.float32(1.0), 8)
    embedding = 3.0 * jax.random.normal(jax.random.key(0), (2, 3, 16))
    stream = scheme.open(embedding, at, ends)
    again = scheme.rebuild(residual(scheme, stream), at, ends)
    assert_close(scheme.read(again), scheme.read(stream), terms=16, chain=4, scale=1.0)
    for one, other in zip(scheme.lanes(again), scheme.lanes(stream), strict=True):
        assert_close(one, other, terms=16, chain=4, scale=1.0)
