"""RMSNorm and LayerNorm, for schemes that normalise outside of the pre-norm base class."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


def rms_norm(x: Float[Array, "*n D"], gain: Float[Array, " D"], epsilon: float) -> Float[Array, "*n D"]:
    """`gain * x / sqrt(mean(x^2) + epsilon)` in float32, returned in the dtype of x. Zhang & Sennrich 2019."""
    wide = x.astype(jnp.float32)
    return (gain * (wide * jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + epsilon))).astype(x.dtype)


def layer_norm(
    x: Float[Array, "*n D"], gain: Float[Array, " D"], bias: Float[Array, " D"], epsilon: float
) -> Float[Array, "*n D"]:
    """`gain (x - mean(x)) / sqrt(var(x) + epsilon) + bias` in float32, returned in the dtype of x. Ba et al. 2016."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    direction = centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + epsilon)
    return (gain * direction + bias).astype(x.dtype)
