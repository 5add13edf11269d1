"""Helpers that the kernels share: memory positions of a block of rows, and reading rows as float32."""

import triton
import triton.language as tl
from triton.language import constexpr


@triton.jit
def tile(block, N: constexpr, D: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    """For a block: its rows, which of them exist, its columns, their positions in memory, and the mask."""
    row = block * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    place = row.to(tl.int64)[:, None] * D + column[None, :]
    return row, row < N, column, place, (row < N)[:, None] & (column < D)[None, :]


@triton.jit
def load(ptr, place, mask):
    return tl.load(ptr + place, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def vector(ptr, column, D: constexpr):
    """A float32 `[D]` array as `[1, COLUMNS]`, with zeros beyond D."""
    return tl.load(ptr + column, mask=column < D, other=0.0)[None, :]


@triton.jit
def inverse_rms(x, D: constexpr, EPSILON: constexpr):
    return (1.0 / tl.sqrt(tl.sum(x * x, 1) / D + EPSILON))[:, None]
