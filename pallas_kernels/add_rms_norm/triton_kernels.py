"""The two raw Triton kernels of `add_rms_norm`. Imports triton: only `triton.py` beside it may import this file.

The arithmetic of `block.py`, in the same order. A program walks blocks of ROWS rows and COLUMNS >= D columns,
both powers of two: its own number, then every PROGRAMS-th.
"""

import triton
import triton.language as tl


@triton.jit
def forward(
    stream_ptr,
    update_ptr,
    weight_ptr,
    total_ptr,
    normed_ptr,
    N: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EPSILON: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0)[None, :]
    place = row.to(tl.int64)[:, None] * D + column[None, :]
    mask = (row < N)[:, None] & (column < D)[None, :]
    stream = tl.load(stream_ptr + place, mask=mask, other=0.0).to(tl.float32)
    update = tl.load(update_ptr + place, mask=mask, other=0.0).to(tl.float32)
    stored = (stream + update).to(total_ptr.dtype.element_ty)
    total = stored.to(tl.float32)
    per_row = (1.0 / tl.sqrt(tl.sum(total * total, 1) / D + EPSILON))[:, None]
    tl.store(total_ptr + place, stored, mask=mask)
    tl.store(normed_ptr + place, (weight * (total * per_row)).to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward(
    total_ptr,
    d_total_ptr,
    d_normed_ptr,
    weight_ptr,
    d_sum_ptr,
    partial_ptr,
    N: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EPSILON: tl.constexpr,
):
    column = tl.arange(0, COLUMNS)
    inside = column < D
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)[None, :]
    partial = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in range(tl.program_id(0), BLOCKS, PROGRAMS):
        row = block * ROWS + tl.arange(0, ROWS)
        place = row.to(tl.int64)[:, None] * D + column[None, :]
        mask = (row < N)[:, None] & inside[None, :]
        total = tl.load(total_ptr + place, mask=mask, other=0.0).to(tl.float32)
        d_total = tl.load(d_total_ptr + place, mask=mask, other=0.0).to(tl.float32)
        d_normed = tl.load(d_normed_ptr + place, mask=mask, other=0.0).to(tl.float32)
        per_row = (1.0 / tl.sqrt(tl.sum(total * total, 1) / D + EPSILON))[:, None]
        scaled = per_row * d_normed
        product = scaled * total
        along = tl.sum(product * weight, 1)[:, None]
        d_sum = d_total + scaled * weight - (along * per_row * per_row / D) * total
        tl.store(d_sum_ptr + place, d_sum.to(d_sum_ptr.dtype.element_ty), mask=mask)
        partial += product
    tl.store(partial_ptr + tl.program_id(0) * D + column, tl.sum(partial, 0), mask=inside)
