"""Groups of rows, `[G, N, D]` with `[G, k]` indices into each group, as one `[G N, D]` array; and XLA's take
and put.

Indices are unique and in range by contract, which is what lets a put go without an addition, in place, in any
order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

_CONTRACT = dict(mode="promise_in_bounds", unique_indices=True)


def flat(x: Float[Array, "G N D"]) -> Float[Array, "G*N D"]:
    return x.reshape(-1, x.shape[-1])


def flat_indices(indices: Int[Array, "G k"], rows: int) -> Int[Array, G * k]:
    """Indices into `[G N, D]`."""
    if indices.shape[0] == 1:
        return indices[0]
    offsets = rows * jnp.arange(indices.shape[0], dtype=indices.dtype)
    return (indices + offsets[:, None]).reshape(-1)


def take(x: Float[Array, M * D], indices: Int[Array, " k"]) -> Float[Array, k * D]:
    return x.at[indices].get(**_CONTRACT)


def put(x: Float[Array, M * D], rows: Float[Array, k * D] | float, indices: Int[Array, " k"]) -> jax.Array:
    return x.at[indices].set(rows, **_CONTRACT)
