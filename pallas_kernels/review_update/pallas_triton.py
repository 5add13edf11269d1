"""`review_update` on GPU by Pallas-Triton: one pass forward (4 tensors read, 2 written), one backward (6, 4).

**Why this exists.** Every later row sum depends on an earlier one; the rows stay in registers between them.
**Numerics.** As the op. **Backend.** See `pallas_triton_rows`.
"""

from __future__ import annotations

import functools

from jax import Array

from pallas_kernels import pallas_triton_rows
from pallas_kernels.review_update import block

PLATFORMS = pallas_triton_rows.PLATFORMS

forward = functools.partial(block.forward, pallas_triton_rows.rows_call)
backward = functools.partial(block.backward, pallas_triton_rows.rows_call)


def refusal(stream: Array, *others: Array, epsilon: float) -> str | None:
    return pallas_triton_rows.refusal(block.BACKWARD, stream.shape[-1], stream.dtype)


def expected_bytes_moved(n: int, width: int, dtype: object, *, backward: bool = False) -> int:
    """Bytes of one forward or backward pass over `[n, width]` rows."""
    return pallas_triton_rows.expected_bytes_moved(block.BACKWARD if backward else block.FORWARD, n, width, dtype)
