"""`nag_update` in plain jnp, one line per equation: the oracle of every other implementation.

Differentiated by JAX itself, in both modes. Statistics in float32 (float64 where an input is float64).
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.nag_update.constants import EPS_NORM, EPS_UPDATE


def forward(
    direction: Float[Array, "N D"],
    log_norm: Float[Array, " N"],
    update: Float[Array, "N D"],
    turn: Float[Array, " N"],
) -> tuple[Float[Array, "N D"], Float[Array, " N"]]:
    exact = jnp.promote_types(jnp.result_type(direction, update), jnp.float32)
    r, u = direction.astype(exact), update.astype(exact)
    t = turn[:, None]
    u = u - jnp.mean(u, -1, keepdims=True)
    u_perp = u - jnp.mean(u * r, -1, keepdims=True) * r
    n = u_perp * jax.lax.rsqrt(jnp.mean(u_perp * u_perp, -1, keepdims=True) + EPS_UPDATE)
    y = r + t * n
    y = y * jax.lax.rsqrt(jnp.mean(y * y, -1, keepdims=True) + EPS_NORM)
    return y.astype(direction.dtype), log_norm + 0.5 * jnp.log1p(turn * turn)
