"""`nag_update` for the XLA compiler: the reference forward with a hand-written backward.

Why this exists: on CPU the compiler makes each row mean a loop of its own, so their number is what counts.
Forward: four means and one elementwise loop. Backward: nine means and one loop that writes both gradients, from
the three inputs alone; JAX's derivative of the reference keeps and rereads several [N, D] intermediates.
Numerics: float32 (float64 for float64 inputs) everywhere, each output rounded once.
Backend: any; what a CPU trains with, and what a platform without a fitting kernel uses.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.nag_update import algebra, reference

PLATFORMS = None


def refusal(*inputs: jax.Array) -> str | None:
    return None


def forward(direction, log_norm, update, turn):
    return reference.forward(direction, log_norm, update, turn), ()


def backward(residuals, cotangents):
    direction, update, turn = residuals
    g, ds = cotangents
    t = turn[:, None]
    r, u, g = _exact(direction, update, g)
    w, a, rr, state = _turned(r, u, t)
    of_g = _mean(g), _mean(g * r), _mean(g * w)
    out = algebra.gradients(state, a, _mean(r), rr, t, *of_g, direction.shape[-1])
    dr = out.r_g * g + out.r_r * r + out.r_w * w
    du = out.u_g * g + out.u_r * r + out.u_w * w + out.u_1
    return dr, ds, du, out.dt[:, 0] + algebra.log_lane_gradient(ds, turn)


def _turned(r, u, t):
    c = u - _mean(u)
    a = _mean(c * r)
    w = c - a * r
    rr = _mean(r * r)
    return w, a, rr, algebra.turned(rr, _mean(w * r), _mean(w * w), t)


def _exact(*arrays):
    dtype = jnp.promote_types(jnp.result_type(*arrays), jnp.float32)
    return tuple(x.astype(dtype) for x in arrays)


def _mean(x):
    return jnp.mean(x, -1, keepdims=True)
