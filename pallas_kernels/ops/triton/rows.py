"""The kernels that move rows by index: one program takes ROWS of the N selected rows."""

import triton
import triton.language as tl
from triton.language import constexpr

from pallas_kernels.ops.triton.tile import tile


@triton.jit
def _places(index_ptr, N: constexpr, D: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    row, valid, column, compact, mask = tile(tl.program_id(0), N, D, ROWS, COLUMNS)
    chosen = tl.load(index_ptr + row, mask=valid, other=0)
    return compact, chosen.to(tl.int64)[:, None] * D + column[None, :], mask


@triton.jit
def take(x_ptr, index_ptr, out_ptr, N: constexpr, D: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    compact, whole, mask = _places(index_ptr, N, D, ROWS, COLUMNS)
    tl.store(out_ptr + compact, tl.load(x_ptr + whole, mask=mask), mask=mask)


@triton.jit
def put(into_ptr, rows_ptr, index_ptr, N: constexpr, D: constexpr, ROWS: constexpr, COLUMNS: constexpr):
    compact, whole, mask = _places(index_ptr, N, D, ROWS, COLUMNS)
    tl.store(into_ptr + whole, tl.load(rows_ptr + compact, mask=mask), mask=mask)
