"""A matmul whose result is already known, with its gradient."""

import jax
from jaxtyping import Array, Float


@jax.custom_jvp
def recalled(
    rows: Float[Array, "B k D"], weight: Float[Array, "D C"], product: Float[Array, "B k C"]
) -> Float[Array, "B k C"]:
    """`rows @ weight`, given its value `product`. The value is not computed again; the gradient is that of the
    matmul."""
    return product


@recalled.defjvp
def _tangent(primals, tangents):
    rows, weight, product = primals
    d_rows, d_weight, _ = tangents
    return product, d_rows @ weight.astype(rows.dtype) + rows @ d_weight.astype(rows.dtype)
