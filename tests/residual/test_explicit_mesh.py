"""Schemes in a user's own model on a mesh with Explicit axes: arrays say how they are split, and nothing is wrapped."""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import nagjax
from nagjax.errors import UserError
from pallas_kernels import shard_rows
from tests.own_models import SUBLAYERS, WIDTH, residual, stacked
from tests.residual.stack import normal
from tests.residual.test_in_shard_map import NAMES, assert_same

DATA = P("data")


@pytest.fixture
def mesh():
    if jax.device_count() < 4:
        pytest.skip("needs 4 devices")
    return jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Explicit,) * 2, devices=jax.devices()[:4])


def both(module, forward, mesh, rows=DATA, wrap=lambda step: step):
    """Gradients of the parameters and of the rows: on one device, and with the rows split over the mesh."""
    graph, params = nnx.split(module)
    x = normal(0, 4, 6, WIDTH)

    def grads(params, x):
        return jax.grad(lambda p, x: jnp.mean(forward(nnx.merge(graph, p), x) ** 3), argnums=(0, 1))(params, x)

    want = jax.jit(grads)(params, x)
    with jax.set_mesh(mesh):
        got = jax.jit(wrap(grads))(params, jax.device_put(x, NamedSharding(mesh, rows)))
        assert got[1].sharding.spec[: len(rows)] == rows[: len(rows)]
    return want, jax.device_get(got)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_one_device(name, mesh):
    assert_same(*both((residual(name), stacked()), lambda own, x: own[0](x, [own[1]], progress=1.0), mesh))


@pytest.mark.parametrize("rows", [P(), P("data", "tensor"), P(("data", "tensor"))], ids=str)
def test_rows_may_be_whole_or_split_over_several_axes(rows, mesh):
    own = residual("nag"), stacked()
    assert_same(*both(own, lambda own, x: own[0](x, [own[1]], progress=1.0), mesh, rows))


@pytest.mark.parametrize("rows", [P("data", "tensor"), P(("data", "tensor")), P("data")], ids=str)
def test_images_may_be_split_along_their_first_two_axes(rows, mesh):
    own, x = residual("nag"), normal(0, 4, 6, 2, WIDTH)
    want = own(x, [jnp.tanh] * SUBLAYERS, progress=1.0)
    with jax.set_mesh(mesh):
        got = own(jax.device_put(x, NamedSharding(mesh, rows)), [jnp.tanh] * SUBLAYERS, progress=1.0)
    assert got.sharding.spec[: len(rows)] == rows[: len(rows)]
    assert_same([want], [jax.device_get(got)])


@pytest.mark.parametrize("name", ["nag", "plain"])
def test_what_would_not_stay_split_is_refused_by_name(name, mesh):
    own, x = residual(name), normal(0, 4, 6, 2, WIDTH)
    split = lambda x, *axes: jax.sharding.reshard(x, P(*axes))  # noqa: E731
    routed = nagjax.MixtureOfDepths(own, 0.5, rngs=nnx.Rngs(1))
    told = "on an Explicit mesh only the first two axes before the features may be split"
    with jax.set_mesh(mesh):
        with pytest.raises(UserError, match=f"x = .*None, None, 'tensor'.*{told}"):
            own.open(split(x, None, None, "tensor"))
        with pytest.raises(UserError, match=f"update = .*{told}"):
            own(x, [lambda x: split(x, None, None, "tensor")] * SUBLAYERS, progress=1.0)
        tokens = split(x[:, :, 0], "data", "tensor")
        with pytest.raises(UserError, match="x = .*tokens of a sequence are chosen together"):
            routed(tokens, [jnp.tanh] * SUBLAYERS, progress=1.0)
        with pytest.raises(UserError, match="stream = .*tokens of a sequence are chosen together"):
            routed.advance(own.open(tokens, progress=1.0), jnp.tanh, 1)


def test_rows_that_are_split_only_in_the_update(mesh):
    x, own = normal(0, 4, 6, WIDTH), residual("nag")
    want = own(x, [jnp.tanh] * SUBLAYERS, progress=1.0)
    split = lambda rows: jax.sharding.reshard(jnp.tanh(rows), P("data"))  # noqa: E731
    with jax.set_mesh(mesh):
        got = jax.jit(lambda x: own(x, [split] * SUBLAYERS, progress=1.0))(jax.device_put(x, NamedSharding(mesh, P())))
    assert got.sharding.spec[0] == "data"
    assert_same([want], [jax.device_get(got)])


@pytest.mark.parametrize("name", ["nag", "plain"])
def test_gradients_through_a_vmap_over_the_split_axis(name, mesh):
    own = residual(name), stacked()
    each = lambda own, x: jax.vmap(lambda row: own[0](row, [own[1]], progress=1.0))(x)  # noqa: E731
    assert_same(*both(own, each, mesh))


def test_gains_that_are_split_where_the_rows_are_whole(mesh):
    own, x = residual("plain"), normal(0, 4, 6, WIDTH)
    graph, params = nnx.split(own)
    run = lambda params, x: nnx.merge(graph, params)(x, [jnp.tanh] * SUBLAYERS, progress=1.0)  # noqa: E731
    want = run(params, x)
    split = lambda leaf: NamedSharding(mesh, P(*[None] * (leaf.ndim - 1), "tensor"))  # noqa: E731
    with jax.set_mesh(mesh):
        got = jax.jit(run)(
            jax.device_put(params, jax.tree.map(split, params)), jax.device_put(x, NamedSharding(mesh, P()))
        )
    assert_same([want], [jax.device_get(got)])


@pytest.mark.parametrize("wrap", [False, True])
@pytest.mark.parametrize("kinds", [(AxisType.Auto, AxisType.Explicit), (AxisType.Explicit, AxisType.Auto)], ids=str)
def test_a_mesh_of_both_kinds_of_axes(kinds, wrap, mesh):
    mixed, own = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=kinds, devices=jax.devices()[:4]), residual("nag")
    x, run = normal(0, 4, 6, WIDTH), lambda x: own(x, [jnp.tanh] * SUBLAYERS, progress=1.0)
    with jax.set_mesh(mixed):
        placed = jax.device_put(x, NamedSharding(mixed, P("data")))
        got = jax.jit(shard_rows(run, mixed, "data") if wrap else run)(placed)
    assert_same([run(x)], [jax.device_get(got)])


@pytest.mark.parametrize("how", [{}, {"causal": True, "cuts": jnp.full(SUBLAYERS, 0.2)}], ids=["top-k", "causal"])
@pytest.mark.parametrize("wrap", [lambda mesh: lambda step: step, lambda mesh: lambda s: shard_rows(s, mesh, "data")])
@pytest.mark.parametrize("name", ["nag", "plain"])
def test_with_mixture_of_depths(name, wrap, how, mesh):
    own = nagjax.MixtureOfDepths(residual(name), 0.5, rngs=nnx.Rngs(1))
    forward = lambda own, x: own(x, [jnp.tanh] * SUBLAYERS, progress=1.0, **how)[0]  # noqa: E731
    assert_same(*both(own, forward, mesh, wrap=wrap(mesh)))
