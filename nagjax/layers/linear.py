"""A linear map, with or without a bias."""

from flax import nnx
from jaxtyping import Array, Float

from nagjax.layers import cpu
from nagjax.layers.platform import on_one_cpu


def linear(x: Float[Array, "B T m"], weight: nnx.Param, added: nnx.Param | None) -> Float[Array, "B T n"]:
    """`x W`, plus the bias if there is one, in x's dtype."""
    weight = weight[...].astype(x.dtype)
    product = cpu.product(x, weight) if on_one_cpu() else x @ weight
    return product if added is None else product + added[...].astype(x.dtype)
