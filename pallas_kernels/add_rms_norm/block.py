"""The arithmetic of `add_rms_norm` on a block of rows, for the Pallas launchers."""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array, lax
from jaxtyping import Float

from pallas_kernels.blocks import RowKernel


def _forward(rows, vectors, *, width, dtype, epsilon):
    (stream, update), (weight,) = rows, vectors
    total = (stream + update).astype(dtype).astype(jnp.float32)
    inverse_rms = lax.rsqrt(jnp.sum(total * total, axis=-1, keepdims=True) / width + epsilon)
    return (total, weight * (total * inverse_rms)), ()


def _backward(rows, vectors, *, width, dtype, epsilon):
    (total, d_total, d_normed), (weight,) = rows, vectors
    inverse_rms = lax.rsqrt(jnp.sum(total * total, axis=-1, keepdims=True) / width + epsilon)
    scaled = inverse_rms * d_normed
    product = scaled * total
    along = jnp.sum(product * weight, axis=-1, keepdims=True)
    pull = along * inverse_rms * inverse_rms / width
    return (d_total + scaled * weight - pull * total,), (product,)


FORWARD = RowKernel("add_rms_norm", _forward, rows=2, vectors=1, outputs=2)
BACKWARD = RowKernel("add_rms_norm_backward", _backward, rows=3, vectors=1, outputs=1, sums=1)


def forward(
    launch,
    stream: Float[Array, "N D"],
    update: Float[Array, "N D"],
    weight: Float[Array, " D"],
    *,
    epsilon: float,
) -> tuple[tuple[Array, ...], tuple[()]]:
    """Outputs `(stream', normed)` by a launcher's `rows_call`; nothing more is saved."""
    return launch(FORWARD, (stream, update), (weight,), epsilon=epsilon)


def backward(
    launch, residuals: tuple[Array, Array], cotangents: tuple[Array, Array], *, epsilon: float
) -> tuple[Float[Array, "N D"], Float[Array, "N D"], Float[Array, " D"]]:
    """Gradients of stream and update (one array for both) and of `weight`, float32."""
    weight, total = residuals
    (d_sum,), (d_weight,) = launch(BACKWARD, (total, *cotangents), (weight,), epsilon=epsilon)
    return d_sum, d_sum, d_weight
