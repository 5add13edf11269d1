"""The layers' parameters and their initial values."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nagjax.parameters import parameter


class Scales(NamedTuple):
    """Factors for a branch's initial values: `output` for its output projection, `inner` for the map that its output is
    linear in (see `nagjax.residual.protocol.Scheme`)."""

    output: Float[Array, ""] | float = 1.0
    inner: Float[Array, ""] | float = 1.0


def matrix(
    rngs: nnx.Rngs, shape: tuple[int, ...], axes: tuple[str | None, ...], scale: Float[Array, ""] | float = 1.0
) -> nnx.Param:
    """A hidden matrix [in, out], or several stacked ones, float32, normal with standard deviation
    `scale / sqrt(in)`."""
    value = jax.random.normal(rngs.params(), shape) * (scale * shape[-2] ** -0.5)
    return parameter(value, axes, "matrix")


def table(
    rngs: nnx.Rngs, shape: tuple[int, int], std: float, rows: str | None = "vocab", role: str = "embedding"
) -> nnx.Param:
    """A table of rows [entries, D], float32, normal with standard deviation `std`."""
    return parameter(jax.random.normal(rngs.params(), shape) * std, (rows, "embed"), role)


def restart(module: nnx.Module, std: Callable[[tuple[str | None, ...]], float]) -> None:
    """Rescales the initial values of a module's matrices [..., in, out] in place, so that their standard deviation is
    `std(axes)` times the `scale` with which `matrix` drew them."""
    for leaf in jax.tree.leaves(nnx.state(module, nnx.Param), is_leaf=lambda leaf: isinstance(leaf, nnx.Variable)):
        facts = leaf.get_metadata()
        if facts["role"] == "matrix":
            leaf[...] = leaf[...] * (std(facts["axes"]) * leaf.shape[-2] ** 0.5)


def bias(size: int, axis: str | None) -> nnx.Param:
    """The bias of a linear map: [size], float32, starts at 0."""
    return parameter(jnp.zeros((size,), jnp.float32), (axis,), "norm")


def gain(size: int, axis: str | None) -> nnx.Param:
    """A factor per feature: [size], float32, starts at 1."""
    return parameter(jnp.ones((size,), jnp.float32), (axis,), "norm")
