"""`add_rms_norm` on GPU by raw Triton kernels: what stays when JAX drops Pallas-Triton.

Why this exists and numerics: as `pallas_triton`. Backend: jax_triton, extra `triton`; see `triton_rows`.
"""

from __future__ import annotations

import functools

from jax import Array

from pallas_kernels import triton_rows
from pallas_kernels.add_rms_norm import block
from pallas_kernels.blocks import RowKernel

PLATFORMS = triton_rows.PLATFORMS


def _launch(kernel: RowKernel, rows, vectors, *, epsilon: float):
    from pallas_kernels.add_rms_norm import triton_kernels

    jitted = triton_kernels.backward if kernel.sums else triton_kernels.forward
    return triton_rows.rows_call(kernel, jitted, rows, vectors, epsilon=epsilon)


forward = functools.partial(block.forward, _launch)
backward = functools.partial(block.backward, _launch)


def refusal(stream: Array, *others: Array, epsilon: float) -> str | None:
    return triton_rows.refusal(block.BACKWARD, stream)


def expected_bytes_moved(n: int, width: int, dtype: object, *, backward: bool = False) -> int:
    """Bytes of one forward or backward pass over `[n, width]` rows."""
    return triton_rows.expected_bytes_moved(block.BACKWARD if backward else block.FORWARD, n, width, dtype)
