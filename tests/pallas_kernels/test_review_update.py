import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from pallas_kernels import review_update, shard_rows
from pallas_kernels.launch import interpreting
from pallas_kernels.shapes import COVER
from tests.pallas_kernels import row_oracles
from tests.tolerance import assert_close


def by(*names):
    return {name: functools.partial(review_update, implementation=name) for name in names}


@pytest.mark.parametrize("n, width, dtype", COVER[1::2])
def test_values_and_gradients(n, width, dtype):
    primals, cotangents = row_oracles.inputs(4, 2, n, width, dtype)
    row_oracles.compare(row_oracles.review_update, by("reference", "xla"), primals, cotangents)


def test_gate_of_the_paper():
    """h + sigmoid(W_h rms(h) + W_u rms(u) + b) * u, with the products taken of normalised rows."""
    keys = jax.random.split(jax.random.key(1), 5)
    h, u = jax.random.normal(keys[0], (7, 96)), 5 * jax.random.normal(keys[1], (7, 96))
    w_h, w_u = (0.1 * jax.random.normal(k, (96, 96)) for k in keys[2:4])
    b = jax.random.normal(keys[4], (96,))
    total, normed = review_update(h, u, h @ w_h, u @ w_u, b, jnp.ones(96))

    def unit(x):
        return x / np.sqrt((np.asarray(x, np.float64) ** 2).mean(-1, keepdims=True) + 1e-5)

    gate = 1 / (1 + np.exp(-(unit(h) @ np.asarray(w_h) + unit(u) @ np.asarray(w_u) + b)))
    assert_close(total, np.asarray(h) + gate * u, terms=96, chain=2)
    assert_close(normed, unit(np.asarray(h) + gate * u), terms=96, chain=3)


def test_start_of_training_is_half_of_every_update():
    """Zero gate weights and bias: the gate is one half for every channel, exactly."""
    h, u = jnp.arange(64.0)[None], jnp.full((1, 64), 3.0)
    nothing = jnp.zeros((1, 64))
    total, _ = review_update(h, u, nothing, nothing, jnp.zeros(64), jnp.ones(64))
    chex.assert_trees_all_equal(total, h + 1.5)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_edge_rows(implementation):
    rows = jnp.stack([jnp.zeros(96), jnp.full(96, 1e17), jnp.full(96, 1e-30), jnp.full(96, -0.0)])
    op = functools.partial(review_update, implementation=implementation)
    args = (rows, rows, rows, rows, jnp.zeros(96), jnp.ones(96), jnp.float32(1.0))
    outputs, pull = jax.vjp(op, *args)
    gradients = pull(jax.tree.map(jnp.ones_like, outputs))
    chex.assert_tree_all_finite((outputs, gradients))
    assert_close(outputs[1][1], np.ones(96), terms=1, chain=4)
    assert np.signbit(outputs[0][3]).all()


def test_closed_and_open_gates():
    """For very large or small logits the update is taken whole or dropped, and the gate's gradients are zero."""
    h, u = jnp.ones((2, 64)), jnp.full((2, 64), 2.0)
    ones, vector = jnp.ones((2, 64)), jnp.ones(64)
    far = jnp.array([[-1e4], [1e4]]) * ones
    (total, _), pull = jax.vjp(review_update, h, u, far, 0 * ones, 0 * vector, vector, jnp.float32(1.0))
    np.testing.assert_array_equal(total, np.asarray(h) + np.array([[0.0], [2.0]]))
    gradients = pull((ones, ones))
    chex.assert_tree_all_finite(gradients)
    chex.assert_trees_all_equal(gradients[2], 0 * ones)


def test_only_the_inputs_are_saved():
    primals, _ = row_oracles.inputs(4, 2, 32, 640, "float32")
    _, pull = jax.vjp(review_update, *primals)
    saved = sum(x.size for x in jax.tree.leaves(pull) if hasattr(x, "size"))
    assert saved <= 4 * 32 * 640 + 4 * 640 + 8


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sharded_rows_equal_whole_rows(kind):
    """Four devices, kernels interpreted per shard: the same values, vector gradients summed over shards."""
    primals, cotangents = row_oracles.inputs(4, 2, 24, 96, "float32")

    def step(implementation, primals, cotangents):
        op = functools.partial(review_update, implementation=implementation)
        return row_oracles.with_gradients(op, primals, cotangents)

    mesh = jax.make_mesh((4,), ("data",), axis_types=(kind,))
    rows = NamedSharding(mesh, P("data"))
    primals, cotangents = jax.tree.map(
        lambda x: jax.device_put(x, rows if x.ndim == 2 else NamedSharding(mesh, P())), (primals, cotangents)
    )
    with interpreting(), jax.set_mesh(mesh):
        sharded = jax.jit(shard_rows(functools.partial(step, "pallas_triton"), mesh, P("data")))
        got = sharded(primals, cotangents)
        assert "all-reduce" in sharded.lower(primals, cotangents).compile().as_text()
    want = jax.jit(functools.partial(step, "xla"))(*jax.device_get((primals, cotangents)))
    assert_close(jax.device_get(got), jax.device_get(want), terms=96, chain=4)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(update=jnp.zeros((3, 64))), "update = float32[3, 64]"),
        (dict(gate_state=jnp.zeros((4, 64), jnp.bfloat16)), "gate_state = bfloat16[4, 64]"),
        (dict(gate_update=jnp.zeros((4, 32))), "gate_update = float32[4, 32]"),
        (dict(bias=jnp.zeros(63)), "bias = float32[63]"),
        (dict(gain=jnp.zeros(64, jnp.bfloat16)), "gain = bfloat16[64]"),
        (dict(epsilon=1), "epsilon = 1"),
    ],
)
def test_bad_arguments_are_named(change, words):
    rows = {name: jnp.zeros((4, 64)) for name in ("stream", "update", "gate_state", "gate_update")}
    with pytest.raises(ValueError) as error:
        review_update(**(rows | dict(bias=jnp.zeros(64), gain=jnp.zeros(64)) | change))
    assert words in str(error.value)
