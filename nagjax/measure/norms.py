"""Lengths: of the residual, and of what a branch writes on it.

`h` [..., D] are residuals in front of a branch or block, `update` [..., D] what it adds: `h_after - h`. All float32,
dimensionless except where said; every function works on the last axis and keeps the others.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float

TINY = 1e-30


def norm(h: Float[Array, "*n D"]) -> Float[Array, " *n"]:
    """Euclidean length `||h||`."""
    h = h.astype(jnp.float32)
    return jnp.sqrt(jnp.sum(h**2, axis=-1))


def variance(h: Float[Array, "*n D"]) -> Float[Array, " *n"]:
    """`mean_d (h_d - mean_d h)^2`, what LayerNorm Scaling keeps from growing with depth (Sun et al. 2025,
    arXiv:2502.05795, Section 3)."""
    return jnp.var(h.astype(jnp.float32), axis=-1)


def relative_contribution(update: Float[Array, "*n D"], h: Float[Array, "*n D"]) -> Float[Array, " *n"]:
    """`||update|| / ||h||` (Csordas et al. 2025, arXiv:2505.13898, Section 3): 0 does nothing."""
    return norm(update) / jnp.maximum(norm(h), TINY)


def cosine(a: Float[Array, "*n D"], b: Float[Array, "*n D"]) -> Float[Array, " *n"]:
    """`<a, b> / (||a|| ||b||)`; 0 where a vector is zero. Of an update and its residual (Csordas et al. 2025,
    arXiv:2505.13898): below 0 it erases, near 0 it writes something new, above 0 it amplifies."""
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    return jnp.sum(a * b, axis=-1) / jnp.maximum(norm(a) * norm(b), TINY)
