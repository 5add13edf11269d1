"""What the row ops have to move: k rows, never the whole array."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl


def expected_bytes_moved(selected: int, width: int, dtype: object, *, tensors: int = 2, scalars: int = 1) -> int:
    """Bytes of one pass over the selected rows: take and put read one tensor, write another, and read an
    index.

    The update of selected rows forward: reads direction and update, writes the new rows and saves the old (4
    tensors), with turn, log-norm in and out, and index per row (4 scalars).
    """
    return selected * (tensors * width * jnp.dtype(dtype).itemsize + scalars * 4)


def estimate(x: jax.Array, *, tensors: int = 2, scalars: int = 1, flops: int = 0) -> pl.CostEstimate:
    """For `pl.pallas_call`; `x` is `[k, D]`."""
    moved = expected_bytes_moved(*x.shape, x.dtype, tensors=tensors, scalars=scalars)
    return pl.CostEstimate(flops=flops * x.size, transcendentals=0, bytes_accessed=moved)
