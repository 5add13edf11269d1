"""The NAG update on one block of rows that is already on chip: what the Pallas kernels of every backend
compute.

Rows are float32 `[R, W]`, per-row scalars `[R, 1]`. `width` is the true D; where W is larger, `inside` is the
mask of real columns and every input holds zeros beyond it.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.nag_update import algebra


def forward(r, u, t, width: int, inside: jax.Array | None = None) -> jax.Array:
    """The new direction."""
    w, _, _, state = _turned(r, u, t, width, inside)
    return state.v * r + state.on_w * w


def backward(r, u, g, t, width: int, inside: jax.Array | None = None) -> tuple[jax.Array, ...]:
    """The gradients of direction, update and (without the log lane's part) turn."""
    w, a, rr, state = _turned(r, u, t, width, inside)
    mr, mg, gr, gw = (_mean(x, width) for x in (r, g, g * r, g * w))
    out = algebra.gradients(state, a, mr, rr, t, mg, gr, gw, width)
    dr = out.r_g * g + out.r_r * r + out.r_w * w
    du = out.u_g * g + out.u_r * r + out.u_w * w + out.u_1
    return dr, du, out.dt


def _turned(r, u, t, width, inside):
    c = u - _mean(u, width)
    if inside is not None:
        c = jnp.where(inside, c, 0.0)
    a = _mean(c * r, width)
    w = c - a * r
    rr, wr, q = (_mean(x, width) for x in (r * r, w * r, w * w))
    return w, a, rr, algebra.turned(rr, wr, q, t)


def _mean(x, width):
    return jnp.sum(x, axis=1, keepdims=True) * (1 / width)
