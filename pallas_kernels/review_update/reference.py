"""The Review Residuals update in plain jnp, differentiated by JAX: the oracle of every implementation."""

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float


def inverse_rms(rows: Float[Array, "N D"], epsilon: float) -> Float[Array, "N 1"]:
    """`1 / sqrt(mean(rows ** 2) + epsilon)` of every row, in the dtype of `rows`."""
    return lax.rsqrt(jnp.mean(rows * rows, axis=-1, keepdims=True) + epsilon)


def forward(
    stream: Float[Array, "N D"],
    update: Float[Array, "N D"],
    gate_state: Float[Array, "N D"],
    gate_update: Float[Array, "N D"],
    bias: Float[Array, "D"],
    weight: Float[Array, "D"],
    *,
    epsilon: float,
) -> tuple[Float[Array, "N D"], Float[Array, "N D"]]:
    """`stream' = stream + gate * update`, `normed = weight * stream' / rms(stream')`, typed as `stream`.

    `gate = sigmoid(gate_state / rms(stream) + gate_update / rms(update) + bias)`. Everything between reading
    and writing is float32 (float64 for float64 rows); the norm is of the new stream as it is stored.
    """
    wide = jnp.promote_types(stream.dtype, jnp.float32)
    h, u = stream.astype(wide), update.astype(wide)
    from_state = inverse_rms(h, epsilon) * gate_state.astype(wide)
    from_update = inverse_rms(u, epsilon) * gate_update.astype(wide)
    gate = jax.nn.sigmoid(from_state + from_update + bias.astype(wide))
    total = (h + gate * u).astype(stream.dtype)
    rows = total.astype(wide)
    return total, (weight.astype(wide) * (rows * inverse_rms(rows, epsilon))).astype(stream.dtype)
