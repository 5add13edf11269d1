"""Schemes inside a `shard_map` of a user's own, with its types checked, as it does by default."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nagjax
from nagjax.layers.config import MoEConfig
from nagjax.model.transformer import Transformer
from nagjax.residual import find_scheme
from tests import tiny
from tests.own_models import WIDTH, residual, stacked
from tests.residual.stack import normal
from tests.streams import one_per_stream

NAMES = sorted({*one_per_stream(), "nag", "review", "lns"})


def mesh_of_two():
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def both(module, forward, x=None):
    """Gradients of the parameters and of the rows: of the whole batch, and of its halves on two devices."""
    graph, params = nnx.split(module)
    x = normal(0, 4, 6, WIDTH) if x is None else x

    def loss(params, x, over=lambda value: value):
        return over(jnp.mean(forward(nnx.merge(graph, params), x) ** 3))

    def of_halves(params, x):
        return loss(params, x, lambda value: jax.lax.pmean(value, "data"))

    halves = P(), P("data")
    grads = jax.grad(of_halves, argnums=(0, 1))
    sharded = jax.jit(jax.shard_map(grads, mesh=mesh_of_two(), in_specs=halves, out_specs=halves))
    return jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x), sharded(params, x), sharded.trace(params, x)


def assert_same(want, got):
    assert any(np.any(leaf) for leaf in jax.tree.leaves(want))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), want, got)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_the_whole_batch(name):
    want, got, traced = both((residual(name), stacked()), lambda own, x: own[0](x, [own[1]], progress=1.0))
    assert_same(want, got)
    assert "data" in traced.lower(lowering_platforms=("tpu",)).as_text()


@pytest.mark.parametrize("how", [{}, {"causal": True, "cuts": jnp.array([0.3, 0.2])}], ids=["top-k", "causal"])
@pytest.mark.parametrize("name", ["nag", "plain"])
def test_with_mixture_of_depths(name, how):
    own = nagjax.MixtureOfDepths(residual(name, 2), 0.5, rngs=nnx.Rngs(1))
    want, got, _ = both(own, lambda own, x: own(x, [jnp.tanh] * 2, progress=1.0, **how)[0])
    assert_same(want, got)


def test_devices_of_which_one_has_no_token_that_runs_do_not_wait_for_each_other():
    """Gradients of what they share are summed inside the sublayer."""
    own, size = nagjax.MixtureOfDepths(residual("plain", 1), 0.5, rngs=nnx.Rngs(1)), jnp.abs(normal(0, 4, 6, WIDTH))
    own.routing.router.weight[...] = jnp.ones_like(own.routing.router.weight[...])
    low = size * jnp.array([-1.0, -1.0, 1.0, 1.0])[:, None, None]  # scores of the first device's tokens are negative
    how = {"progress": 1.0, "causal": True, "cuts": jnp.zeros(1)}
    assert [own(part, [jnp.tanh], **how)[1].ran.any() for part in (low[:2], low[2:])] == [False, True]
    want, got, _ = both(own, lambda own, x: own(x, [jnp.tanh], **how)[0], low)
    assert_same(want, got)


def test_a_random_router_draws_the_same_tokens_as_on_one_device():
    own, x = (
        nagjax.MixtureOfDepths(residual("plain", 2), 0.5, router="random", rngs=nnx.Rngs(1)),
        normal(0, 4, 6, WIDTH),
    )
    ran = lambda x: own(x, [jnp.tanh] * 2, noise=3)[1].ran  # noqa: E731
    rows = P(None, "data")
    got = jax.jit(jax.shard_map(ran, mesh=mesh_of_two(), in_specs=P("data"), out_specs=rows))(x)
    np.testing.assert_array_equal(got, jax.jit(ran)(x))


@pytest.mark.parametrize("changes", [{}, {"moe": MoEConfig(4, 2)}], ids=["dense", "experts"])
def test_a_transformer(changes):
    config = tiny.model_config(**changes)
    model, tokens = (
        Transformer(config, find_scheme("nag")(), nnx.Rngs(0)),
        jnp.arange(4 * 8).reshape(4, 8) % config.vocab,
    )
    graph, params = nnx.split(model)

    def loss(params, tokens, over=lambda value: value):
        return over(jnp.mean(nnx.merge(graph, params)(tokens).hidden ** 2))

    def of_halves(params, tokens):
        return loss(params, tokens, lambda value: jax.lax.pmean(value, "data"))

    specs = {"in_specs": (P(), P("data")), "out_specs": P()}
    got = jax.jit(jax.shard_map(jax.grad(of_halves), mesh=mesh_of_two(), **specs))(params, tokens)
    assert_same(jax.jit(jax.grad(loss))(params, tokens), got)
