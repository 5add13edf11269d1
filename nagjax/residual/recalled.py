"""The result of a matmul that is known already, with the gradient that it has for some of its rows."""

import jax
from jaxtyping import Array, Float


@jax.custom_jvp
def recalled(
    rows: Float[Array, "B k D"], weight: Float[Array, "D C"], product: Float[Array, "B k C"]
) -> Float[Array, "B k C"]:
    """`rows @ weight`, whose value is `product`: it is not computed again, and differentiated as if it were."""
    return product


@recalled.defjvp
def _tangent(primals, tangents):
    rows, weight, product = primals
    d_rows, d_weight, _ = tangents
    return product, d_rows @ weight.astype(rows.dtype) + rows @ d_weight.astype(rows.dtype)
