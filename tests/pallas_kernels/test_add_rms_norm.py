import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import add_rms_norm
from pallas_kernels.launch import interpreting, tpu
from pallas_kernels.ops.add_rms_norm import BACKWARD
from pallas_kernels.shapes import COVER
from tests.pallas_kernels import row_oracles
from tests.pallas_kernels.kernel_lowering import STRICT
from tests.tolerance import assert_close


def by(*names):
    return {name: functools.partial(add_rms_norm, implementation=name) for name in names}


@pytest.mark.parametrize("n, width, dtype", COVER[::2])
def test_values_and_gradients(n, width, dtype):
    primals, cotangents = row_oracles.inputs(2, 1, n, width, dtype)
    row_oracles.compare(row_oracles.add_rms_norm, by("reference", "xla"), primals, cotangents)


@pytest.mark.parametrize("n, parts", [(600, 2), (1030, 1)])
def test_several_blocks_the_last_one_partly_outside(n, parts):
    """Sums over rows in two halves of the grid, and in one where the number of blocks is odd."""
    assert tpu.grid(BACKWARD, jax.ShapeDtypeStruct((n, 64), jnp.float32))[0] == parts
    primals, cotangents = row_oracles.inputs(2, 1, n, 64, "float32")
    with interpreting(STRICT):
        row_oracles.compare(row_oracles.add_rms_norm, by("mosaic_tpu"), primals, cotangents)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_edge_rows(implementation):
    zero, huge, tiny = jnp.zeros(96), jnp.full(96, 1e17), jnp.full(96, 1e-30)
    rows = jnp.stack([zero, huge, tiny, -zero])
    op = functools.partial(add_rms_norm, implementation=implementation)
    (total, normed), pull = jax.vjp(op, rows, -zero + 0 * rows, jnp.ones(96), jnp.float32(1.0))
    gradients = pull((jnp.ones_like(total), jnp.ones_like(normed)))
    chex.assert_tree_all_finite((total, normed, gradients))
    np.testing.assert_array_equal(normed[0], np.zeros(96))
    assert_close(normed[1], np.ones(96), terms=1, chain=4)
    # A row of zeros passes gradients through at the largest gain there is, 1 / sqrt(epsilon).
    assert_close(gradients[0][0], np.full(96, 1001.0), terms=1, chain=16)


@pytest.mark.parametrize("implementation", ["reference", "xla"])
def test_negative_zero_is_kept(implementation):
    minus = jnp.full((1, 64), -0.0)
    total, normed = add_rms_norm(minus, minus, jnp.ones(64), implementation=implementation)
    assert np.signbit(total).all() and np.signbit(normed).all()


def test_stream_and_update_share_one_gradient():
    primals, cotangents = row_oracles.inputs(2, 1, 7, 96, "bfloat16")
    _, pull = jax.vjp(by("xla")["xla"], *primals)
    d_stream, d_update, *_ = pull(cotangents)
    chex.assert_trees_all_equal(d_stream, d_update)


def test_only_the_stream_is_saved():
    """The residuals of the forward pass: the summed stream, gain and scale, nothing else of row size."""
    primals, _ = row_oracles.inputs(2, 1, 32, 640, "float32")
    _, pull = jax.vjp(add_rms_norm, *primals)
    saved = sum(x.size for x in jax.tree.leaves(pull) if hasattr(x, "size"))
    assert saved <= 32 * 640 + 3 * 640 + 8


def test_scan_with_remat_and_traced_scale():
    """Eight boundaries under scan and checkpoint equal the same written as a loop, gradients included."""
    (stream, update, gain, _), _ = row_oracles.inputs(2, 1, 7, 96, "float32")
    gains = gain * jnp.linspace(0.5, 1.5, 8)[:, None]
    scales = 1 / jnp.sqrt(jnp.arange(1.0, 9.0))

    def layer(stream, normed, gain, scale, implementation):
        return add_rms_norm(stream, jnp.tanh(normed), gain, scale, implementation=implementation)

    def scanned(stream, gains, scales):
        def step(carry, x):
            return jax.checkpoint(functools.partial(layer, implementation=None))(*carry, *x), None

        (stream, normed), _ = jax.lax.scan(step, (stream, update), (gains, scales))
        return jnp.sum(normed * normed[0] + stream)

    def looped(stream, gains, scales):
        carry = stream, update
        for gain, scale in zip(gains, scales, strict=True):
            carry = layer(*carry, gain, scale, "reference")
        return jnp.sum(carry[1] * carry[1][0] + carry[0])

    args = stream, gains, scales
    got = jax.jit(jax.value_and_grad(scanned, (0, 1, 2)))(*args)
    assert_close(got, jax.value_and_grad(looped, (0, 1, 2))(*args), terms=96, chain=16)


@pytest.mark.parametrize(
    "change, words",
    [
        (dict(update=jnp.zeros((3, 64))), "update = float32[3, 64]"),
        (dict(update=jnp.zeros((4, 64), jnp.bfloat16)), "update = bfloat16[4, 64]"),
        (dict(stream=jnp.zeros((4, 64), jnp.int32)), "stream = int32[4, 64]"),
        (dict(gain=jnp.zeros(63)), "gain = float32[63]"),
        (dict(gain=jnp.zeros(64, jnp.bfloat16)), "gain = bfloat16[64]"),
        (dict(scale=jnp.ones(4)), "scale = float32[4]"),
        (dict(epsilon=0.0), "epsilon = 0.0"),
        (dict(implementation="cuda"), "unknown implementation 'cuda'"),
    ],
)
def test_bad_arguments_are_named(change, words):
    good = dict(stream=jnp.zeros((4, 64)), update=jnp.zeros((4, 64)), gain=jnp.zeros(64), scale=1.0)
    with pytest.raises(ValueError) as error:
        add_rms_norm(**(good | change))
    assert words in str(error.value)


def test_a_row_too_wide_for_a_kernel_says_so():
    wide = jax.ShapeDtypeStruct((1, 2**20), jnp.float32)
    for name, words in (("mosaic_tpu", "MiB of VMEM"), ("pallas_triton", "accepted: up to")):
        with pytest.raises(ValueError, match=words):
            jax.eval_shape(by(name)[name], wide, wide, jax.ShapeDtypeStruct((2**20,), jnp.float32))
    jax.eval_shape(add_rms_norm, wide, wide, jax.ShapeDtypeStruct((2**20,), jnp.float32))
