"""The arithmetic of `review_update` on a block of rows, for the Pallas launchers."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array, lax

from pallas_kernels.blocks import RowKernel


def _inverse_rms(rows, width, epsilon):
    return lax.rsqrt(jnp.sum(rows * rows, axis=-1, keepdims=True) / width + epsilon)


def _gated(stream, update, gate_state, gate_update, bias, width, dtype, epsilon):
    per_h, per_u = _inverse_rms(stream, width, epsilon), _inverse_rms(update, width, epsilon)
    gate = jax.nn.sigmoid(per_h * gate_state + per_u * gate_update + bias)
    total = (stream + gate * update).astype(dtype).astype(jnp.float32)
    return total, gate, per_h, per_u, _inverse_rms(total, width, epsilon)


def _forward(rows, vectors, *, width, dtype, epsilon):
    bias, weight = vectors
    total, *_, per_total = _gated(*rows, bias, width, dtype, epsilon)
    return (total, weight * (total * per_total)), ()


def _backward(rows, vectors, *, width, dtype, epsilon):
    *inputs, d_total, d_normed = rows
    stream, update, gate_state, gate_update = inputs
    bias, weight = vectors
    total, gate, per_h, per_u, per_total = _gated(*inputs, bias, width, dtype, epsilon)

    scaled = per_total * d_normed
    product = scaled * total
    along = jnp.sum(product * weight, axis=-1, keepdims=True)
    d_rows = d_total + scaled * weight - (along * per_total * per_total / width) * total

    d_logit = d_rows * update * (gate * (1 - gate))
    pull_h = jnp.sum(d_logit * gate_state, axis=-1, keepdims=True) * per_h * per_h * per_h / width
    pull_u = jnp.sum(d_logit * gate_update, axis=-1, keepdims=True) * per_u * per_u * per_u / width
    gradients = (d_rows - pull_h * stream, d_rows * gate - pull_u * update, per_h * d_logit, per_u * d_logit)
    return gradients, (d_logit, product)


FORWARD = RowKernel("review_update", _forward, rows=4, vectors=2, outputs=2, transcendentals=1)
BACKWARD = RowKernel("review_update_backward", _backward, rows=6, vectors=2, outputs=4, sums=2, transcendentals=1)


def forward(launch, *args: Array, epsilon: float) -> tuple[tuple[Array, ...], tuple[()]]:
    """Outputs `(stream', normed)` of the arguments of `reference.forward`, by a launcher's `rows_call`."""
    return launch(FORWARD, args[:4], args[4:], epsilon=epsilon)


def backward(
    launch, residuals: tuple[Array, ...], cotangents: tuple[Array, Array], *, epsilon: float
) -> tuple[Array, ...]:
    """Gradients of the four `[N, D]` arguments in their dtype, then of `bias` and `weight`, float32 `[D]`."""
    gradients, sums = launch(BACKWARD, (*residuals[:4], *cotangents), residuals[4:], epsilon=epsilon)
    return *gradients, *sums
