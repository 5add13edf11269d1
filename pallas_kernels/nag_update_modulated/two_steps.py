"""The modulated update as two steps: the gate by XLA's matrix products, then any implementation of
`nag_update`. The gate reads the direction a second time; its gradient is the sum of two arrays."""

from __future__ import annotations

from types import ModuleType

import jax
import jax.numpy as jnp

from pallas_kernels.nag_update_modulated import modulator


def forward(inner: ModuleType, direction, log_norm, update, weight, bias, logits, beta, alpha):
    turn = _turn(direction, weight, bias, jax.nn.softmax(logits), beta, alpha).turn[:, 0]
    outputs, _ = inner.forward(direction, log_norm, update, turn)
    return (*outputs, turn), ()


def backward(inner: ModuleType, residuals, cotangents):
    direction, update, weight, bias, logits, beta, alpha = residuals
    g, ds, d_turn = cotangents
    shares = jax.nn.softmax(logits)
    state = _turn(direction, weight, bias, shares, beta, alpha)
    dr, ds, du, dt = inner.backward((direction, update, state.turn[:, 0]), (g, ds))
    gate = modulator.gradients(state, shares[None], beta, alpha, (dt + d_turn)[:, None])
    return (
        dr + _back(gate.z, weight, direction.dtype),
        ds,
        du,
        _weight_gradient(direction, gate.z),
        gate.z.sum(0),
        modulator.through_softmax(shares, gate.shares.sum(0)),
        gate.beta.sum(),
        gate.alpha.sum(),
    )


def _turn(direction, weight, bias, shares, beta, alpha) -> modulator.Turn:
    return modulator.turn(_project(direction, weight) + bias, shares[None], beta, alpha)


def _project(r, weight):
    """r W in float32: of bfloat16 rows by two bfloat16 products, of others in full precision."""
    if r.dtype != jnp.bfloat16:
        exact = jnp.promote_types(r.dtype, jnp.float32)
        return jnp.dot(r.astype(exact), weight, precision="highest")
    both = jnp.concatenate(modulator.split(weight), axis=1)
    high, low = jnp.split(jnp.dot(r, both, preferred_element_type=jnp.float32), 2, axis=1)
    return high + low


def _weight_gradient(r, dz):
    """r^T dz in float32, as `_project`."""
    if r.dtype != jnp.bfloat16:
        exact = jnp.promote_types(r.dtype, jnp.float32)
        return jnp.dot(r.astype(exact).T, dz, precision="highest")
    both = jnp.concatenate(modulator.split(dz), axis=1)
    high, low = jnp.split(jnp.dot(r.T, both, preferred_element_type=jnp.float32), 2, axis=1)
    return high + low


def _back(dz, weight, dtype):
    """dz W^T: of bfloat16 rows a bfloat16 product, since the sum it enters is rounded to that anyway."""
    if dtype != jnp.bfloat16:
        return jnp.dot(dz, weight.T, precision="highest")
    return jnp.dot(dz.astype(dtype), weight.T.astype(dtype))
