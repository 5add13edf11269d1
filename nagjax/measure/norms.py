"""Norms of the residual and of the updates written to it.

`h` [..., D] are residuals before a branch or block, `update` [..., D] is what it adds: `h_after - h`. All results are
float32 and dimensionless unless stated; every function reduces the last axis and keeps the others.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

TINY = 1e-30


def norm(h: Float[Array, "*n D"]) -> Float[Array, " *n"]:
    """Euclidean length `||h||`."""
    h = h.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(h**2, axis=-1))


def variance(h: Float[Array, "*n D"]) -> Float[Array, " *n"]:
    """Variance over features, `mean_d (h_d - mean_d h)^2`, whose growth with depth LayerNorm Scaling limits (Sun et al.
    2025, arXiv:2502.05795, Section 3)."""
    return jnp.var(h.astype(jnp.float32), axis=-1)


def relative_contribution(update: Float[Array, "*n D"], h: Float[Array, "*n D"]) -> Float[Array, " *n"]:
    """`||update|| / ||h||` (Csordas et al. 2025, arXiv:2505.13898, Section 3); 0 if the branch does nothing."""
    return norm(update) / jnp.maximum(norm(h), TINY)


def cosine(a: Float[Array, "*n D"], b: Float[Array, "*n D"]) -> Float[Array, " *n"]:
    """`<a, b> / (||a|| ||b||)`; 0 if a vector is zero. For an update and its residual (Csordas et al. 2025,
    arXiv:2505.13898): below 0 the update erases, near 0 it writes something new, above 0 it amplifies."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.sum(a * b, axis=-1) / jnp.maximum(norm(a) * norm(b), TINY)
