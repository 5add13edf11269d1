"""A linear map, with or without a bias."""

from flax import nnx
from jaxtyping import Array, Float


def linear(x: Float[Array, "B T m"], weight: nnx.Param, added: nnx.Param | None) -> Float[Array, "B T n"]:
    """`x W`, plus the bias if there is one, in x's dtype."""
    product = x @ weight[...].astype(x.dtype)
    return product if added is None else product + added[...].astype(x.dtype)
