"""What the modulated NAG update has to move when gate and update are one pass."""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike


def expected_bytes_moved(rows: int, width: int, gates: int, dtype: DTypeLike, *, backward: bool = False) -> int:
    """Bytes of one pass: the tensors of `nag_update`, and the gate's weight (backward: and its gradient)
    once.

    Per row, forward reads and writes a log-norm and writes a turn; backward reads the gradients of log-norm
    and turn.
    """
    tensors, scalars, weights = (5, 2, 2) if backward else (3, 3, 1)
    per_row = tensors * width * jnp.dtype(dtype).itemsize + scalars * 4
    return rows * per_row + weights * gates * width * 4


def estimate(rows: int, width: int, gates: int, dtype: DTypeLike, *, backward: bool = False) -> pl.CostEstimate:
    """For `pl.pallas_call`."""
    products = 3 if backward else 1
    return pl.CostEstimate(
        flops=((35 if backward else 16) + 2 * products * gates) * rows * width,
        transcendentals=(gates + 4) * rows,
        bytes_accessed=expected_bytes_moved(rows, width, gates, dtype, backward=backward),
    )
