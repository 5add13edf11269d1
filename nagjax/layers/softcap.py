"""A smooth limit on logits."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def softcap(logits: Float[Array, "*n"], cap: float | None) -> Float[Array, "*n"]:
    """`cap tanh(logits / cap)`, between -cap and cap; unchanged if cap is None. Bello et al. 2016, arXiv:1611.09940;
    Gemma 2."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
