"""Residual add and RMS norm in plain jnp, differentiated by JAX: the oracle of every implementation."""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def forward(
    stream: Float[Array, "N D"], update: Float[Array, "N D"], weight: Float[Array, "D"], *, epsilon: float
) -> tuple[Float[Array, "N D"], Float[Array, "N D"]]:
    """`stream' = stream + update`, `normed = weight * stream' / rms(stream')`, in the dtype of `stream`.

    Statistics are taken in float32 (float64 for float64 rows) of the sum as it is stored, so the norm is of
    the stream that the next sublayer will see.
    """
    wide = jnp.promote_types(stream.dtype, jnp.float32)
    total = (stream.astype(wide) + update.astype(wide)).astype(stream.dtype)
    rows = total.astype(wide)
    inverse_rms = lax.rsqrt(jnp.mean(rows * rows, axis=-1, keepdims=True) + epsilon)
    return total, (weight.astype(wide) * (rows * inverse_rms)).astype(stream.dtype)
