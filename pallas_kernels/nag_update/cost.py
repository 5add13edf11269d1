"""What the NAG update has to move: the denominator of every bandwidth figure, and the kernels'
CostEstimate."""

from __future__ import annotations

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.typing import DTypeLike


def expected_bytes_moved(rows: int, width: int, dtype: DTypeLike, *, backward: bool = False) -> int:
    """Bytes of one pass.

    Forward reads direction and update and writes the new direction; per row it reads a turn and a log-norm
    and writes a log-norm. Backward reads direction, update and the incoming gradient and writes two
    gradients; per row it reads turn and gradient of the log-norm, and writes the gradient of the turn.
    """
    tensors = 5 if backward else 3
    return rows * (tensors * width * jnp.dtype(dtype).itemsize + 3 * 4)


def estimate(rows: int, width: int, dtype: DTypeLike, *, backward: bool = False) -> pl.CostEstimate:
    """For `pl.pallas_call`."""
    return pl.CostEstimate(
        flops=(35 if backward else 16) * rows * width,
        transcendentals=2 * rows,
        bytes_accessed=expected_bytes_moved(rows, width, dtype, backward=backward),
    )
