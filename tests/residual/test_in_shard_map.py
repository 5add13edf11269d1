"""Schemes inside a `shard_map` of a user's own, with its types checked, as it does by default."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import nagjax
from tests.own_models import WIDTH, residual, stacked
from tests.residual.stack import normal
from tests.streams import one_per_stream

NAMES = sorted({*one_per_stream(), "nag", "review", "lns"})


def mesh_of_two():
    if jax.device_count() < 2:
        pytest.skip("needs 2 devices")
    return jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])


def both(module, forward):
    """Gradients of the parameters and of the rows: of the whole batch, and of its halves on two devices."""
    graph, params = nnx.split(module)
    x = normal(0, 4, 6, WIDTH)

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


@pytest.mark.parametrize("name", ["nag", "plain"])
def test_with_mixture_of_depths(name):
    own = nagjax.MixtureOfDepths(residual(name, 2), 0.5, rngs=nnx.Rngs(1))
    want, got, _ = both(own, lambda own, x: own(x, [jnp.tanh] * 2, progress=1.0)[0])
    assert_same(want, got)
