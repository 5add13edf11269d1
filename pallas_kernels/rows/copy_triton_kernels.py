"""The raw Triton kernels that move rows by index. Imports triton: only `copy_raw_triton.py` may import this file.

One program takes ROWS selected rows of COLUMNS >= D columns, both powers of two. N is the number of selected rows.
"""

import triton
import triton.language as tl


@triton.jit
def _places(index_ptr, N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    chosen = tl.load(index_ptr + row, mask=row < N, other=0)
    compact = row.to(tl.int64)[:, None] * D + column[None, :]
    whole = chosen.to(tl.int64)[:, None] * D + column[None, :]
    return compact, whole, (row < N)[:, None] & (column < D)[None, :]


@triton.jit
def take(x_ptr, index_ptr, out_ptr, N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    compact, whole, mask = _places(index_ptr, N, D, ROWS, COLUMNS)
    tl.store(out_ptr + compact, tl.load(x_ptr + whole, mask=mask), mask=mask)


@triton.jit
def put(into_ptr, rows_ptr, index_ptr, N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    compact, whole, mask = _places(index_ptr, N, D, ROWS, COLUMNS)
    tl.store(into_ptr + whole, tl.load(rows_ptr + compact, mask=mask), mask=mask)


@triton.jit
def put_aliased(
    into_ptr, rows_ptr, index_ptr, out_ptr, N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    put(out_ptr, rows_ptr, index_ptr, N, D, ROWS, COLUMNS)
