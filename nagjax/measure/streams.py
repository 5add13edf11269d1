"""Measures of schemes with several residual streams."""

import jax.numpy as jnp
from jaxtyping import Array, Float


def composite_gain(mixings: Float[Array, "L n n"]) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Gains of the product `H_L ... H_1` of the matrices that mix n residual streams: the largest absolute row sum
    (forward) and column sum (backward). Both are 1 for doubly stochastic matrices (mHC, arXiv:2512.24880, Section
    3)."""
    product = jnp.eye(mixings.shape[-1])
    for one in mixings:
        product = one @ product
    size = jnp.abs(product)
    return jnp.max(jnp.sum(size, axis=1)), jnp.max(jnp.sum(size, axis=0))
