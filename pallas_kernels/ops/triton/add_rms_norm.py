"""The two kernels of `add_rms_norm`."""

import triton
import triton.language as tl
from triton.language import constexpr

from pallas_kernels.ops.triton.tile import inverse_rms, load, tile, vector

# Signatures: pointers in, pointers out, constants.
# fmt: off


@triton.jit
def forward(
    stream_ptr, update_ptr, weight_ptr, total_ptr, normed_ptr,
    N: constexpr, D: constexpr, ROWS: constexpr, COLUMNS: constexpr, EPSILON: constexpr,
):
    _, _, column, place, mask = tile(tl.program_id(0), N, D, ROWS, COLUMNS)
    weight = vector(weight_ptr, column, D)
    stored = (load(stream_ptr, place, mask) + load(update_ptr, place, mask)).to(total_ptr.dtype.element_ty)
    total = stored.to(tl.float32)
    normed = weight * (total * inverse_rms(total, D, EPSILON))
    tl.store(total_ptr + place, stored, mask=mask)
    tl.store(normed_ptr + place, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward(
    total_ptr, d_total_ptr, d_normed_ptr, weight_ptr, d_sum_ptr, partial_ptr,
    N: constexpr, D: constexpr, ROWS: constexpr, COLUMNS: constexpr,
    BLOCKS: constexpr, PROGRAMS: constexpr, EPSILON: constexpr,
):
    column = tl.arange(0, COLUMNS)
    weight = vector(weight_ptr, column, D)
    partial = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in range(tl.program_id(0), BLOCKS, PROGRAMS):
        _, _, _, place, mask = tile(block, N, D, ROWS, COLUMNS)
        total, d_normed = load(total_ptr, place, mask), load(d_normed_ptr, place, mask)
        d_total = load(d_total_ptr, place, mask)
        per_row = inverse_rms(total, D, EPSILON)
        scaled = per_row * d_normed
        product = scaled * total
        along = tl.sum(product * weight, 1)[:, None]
        d_sum = d_total + scaled * weight - (along * per_row * per_row / D) * total
        tl.store(d_sum_ptr + place, d_sum.to(d_sum_ptr.dtype.element_ty), mask=mask)
        partial += product
    tl.store(partial_ptr + tl.program_id(0) * D + column, tl.sum(partial, 0), mask=column < D)
