"""Rotary position embedding."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rotary(
    x: Float[Array, "B T H Dh"], positions: Int[Array, "B T"], base: float = 10_000.0
) -> Float[Array, "B T H Dh"]:
    """Rotates the halves of each head by position-dependent angles; float32 inside, returns x's dtype.

    `(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)` with angle `position * base ** (-2i/Dh)`: Su et al. 2021,
    arXiv:2104.09864, in the half-split layout of Llama checkpoints. Dh must be even.
    """
    half = x.shape[-1] // 2
    frequency = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = positions[..., None, None].astype(jnp.float32) * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    x1, x2 = x[..., :half].astype(jnp.float32), x[..., half:].astype(jnp.float32)
    return jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
