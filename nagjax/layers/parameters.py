"""Start values and the metadata every parameter carries: logical axis names, and its role for the optimizer.

Roles: "matrix" (hidden matrices: weight decay, Muon if chosen), "embedding", "norm" (gains and
biases), "gate".
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float


class Scales(NamedTuple):
    """Factors on a branch's start values, see `nagjax.residual.protocol.Scheme`."""

    output: Float[Array, ""] | float = 1.0
    inner: Float[Array, ""] | float = 1.0


def matrix(
    rngs: nnx.Rngs, shape: tuple[int, int], axes: tuple[str | None, str | None], scale: Float[Array, ""] | float = 1.0
) -> nnx.Param:
    """A hidden matrix [in, out], float32, normal with standard deviation `scale / sqrt(in)`."""
    value = jax.random.normal(rngs.params(), shape) * (scale * shape[0] ** -0.5)
    return nnx.Param(value, axes=axes, role="matrix")


def table(rngs: nnx.Rngs, shape: tuple[int, int], std: float, rows: str | None = "vocab") -> nnx.Param:
    """A table of rows [entries, D], float32, normal with standard deviation `std`."""
    return nnx.Param(jax.random.normal(rngs.params(), shape) * std, axes=(rows, "embed"), role="embedding")


def bias(size: int, axis: str | None) -> nnx.Param:
    """What a linear map adds: [size], float32, starts at 0."""
    return nnx.Param(jnp.zeros((size,), jnp.float32), axes=(axis,), role="norm")


def gain(size: int, axis: str | None) -> nnx.Param:
    """A factor by feature: [size], float32, starts at 1."""
    return nnx.Param(jnp.ones((size,), jnp.float32), axes=(axis,), role="norm")
