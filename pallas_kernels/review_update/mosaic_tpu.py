"""`review_update` on TPU: one pass forward (4 tensors read, 2 written), one backward (6 read, 4 written).

**Why this exists.** XLA:TPU does not fuse a row sum with what uses it, and this update has three sums forward
and five backward, each of which would read its rows again. **Numerics.** As the op; sums over rows are added
8 partial rows per block, then over blocks. **Backend.** See `mosaic_rows`.
"""

from __future__ import annotations

import functools

from jax import Array

from pallas_kernels import mosaic_rows
from pallas_kernels.review_update import block

PLATFORMS = mosaic_rows.PLATFORMS

forward = functools.partial(block.forward, mosaic_rows.rows_call)
backward = functools.partial(block.backward, mosaic_rows.rows_call)


def refusal(stream: Array, *others: Array, epsilon: float) -> str | None:
    return mosaic_rows.refusal(block.BACKWARD, stream.shape[-1], stream.dtype)


def expected_bytes_moved(n: int, width: int, dtype: object, *, backward: bool = False) -> int:
    """Bytes of one forward or backward pass over `[n, width]` rows."""
    return mosaic_rows.expected_bytes_moved(block.BACKWARD if backward else block.FORWARD, n, width, dtype)
