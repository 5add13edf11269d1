"""Linear maps, with or without a bias."""

from flax import nnx
from jaxtyping import Array, Float

from nagjax.layers import cpu
from nagjax.layers.platform import on_one_cpu


def linear(x: Float[Array, "B T m"], weight: nnx.Param, added: nnx.Param | None) -> Float[Array, "B T n"]:
    """`x W`, plus the bias if there is one, in x's dtype."""
    return linears(x, (weight, added))[0]


def linears(x: Float[Array, "B T m"], *maps: tuple[nnx.Param, nnx.Param | None]) -> tuple[Float[Array, "B T _"], ...]:
    """Several linear maps of the same x; each is a weight, and a bias or None."""
    weights = [weight[...].astype(x.dtype) for weight, _ in maps]
    found = cpu.products(x, *weights) if on_one_cpu() else [x @ weight for weight in weights]
    biases = (added for _, added in maps)
    return tuple(y if b is None else y + b[...].astype(x.dtype) for y, b in zip(found, biases, strict=True))
