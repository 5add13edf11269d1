"""Start values and the metadata every parameter carries: logical axis names, and its role for the optimizer.

Roles: "matrix" (hidden matrices: weight decay, Muon if chosen), "embedding", "norm", "gate".
"""

import jax
from flax import nnx


def matrix(
    rngs: nnx.Rngs, shape: tuple[int, int], axes: tuple[str | None, str | None], scale: float = 1.0
) -> nnx.Param:
    """A hidden matrix [in, out], float32, normal with standard deviation `scale / sqrt(in)`."""
    value = jax.random.normal(rngs.params(), shape) * (scale * shape[0] ** -0.5)
    return nnx.Param(value, axes=axes, role="matrix")


def table(rngs: nnx.Rngs, shape: tuple[int, int], std: float, rows: str | None = "vocab") -> nnx.Param:
    """A table of rows [entries, D], float32, normal with standard deviation `std`."""
    return nnx.Param(jax.random.normal(rngs.params(), shape) * std, axes=(rows, "embed"), role="embedding")
