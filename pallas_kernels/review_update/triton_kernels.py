"""The two raw Triton kernels of `review_update`. Imports triton: only `triton.py` beside it may import this file.

The arithmetic of `block.py`, in the same order. A program walks blocks of ROWS rows and COLUMNS >= D columns,
both powers of two: its own number, then every PROGRAMS-th.
"""

import triton
import triton.language as tl


@triton.jit
def _per_row(x, D: tl.constexpr, EPSILON: tl.constexpr):
    return (1.0 / tl.sqrt(tl.sum(x * x, 1) / D + EPSILON))[:, None]


@triton.jit
def _place(block, column, N: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr):
    row = block * ROWS + tl.arange(0, ROWS)
    place = row.to(tl.int64)[:, None] * D + column[None, :]
    return place, (row < N)[:, None] & (column < D)[None, :]


@triton.jit
def forward(
    stream_ptr,
    update_ptr,
    gate_state_ptr,
    gate_update_ptr,
    bias_ptr,
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
    column = tl.arange(0, COLUMNS)
    bias = tl.load(bias_ptr + column, mask=column < D, other=0.0)[None, :]
    weight = tl.load(weight_ptr + column, mask=column < D, other=0.0)[None, :]
    place, mask = _place(tl.program_id(0), column, N, D, ROWS)
    stream = tl.load(stream_ptr + place, mask=mask, other=0.0).to(tl.float32)
    update = tl.load(update_ptr + place, mask=mask, other=0.0).to(tl.float32)
    gate_state = tl.load(gate_state_ptr + place, mask=mask, other=0.0).to(tl.float32)
    gate_update = tl.load(gate_update_ptr + place, mask=mask, other=0.0).to(tl.float32)
    per_h, per_u = _per_row(stream, D, EPSILON), _per_row(update, D, EPSILON)
    gate = tl.sigmoid(per_h * gate_state + per_u * gate_update + bias)
    stored = (stream + gate * update).to(total_ptr.dtype.element_ty)
    total = stored.to(tl.float32)
    normed = weight * (total * _per_row(total, D, EPSILON))
    tl.store(total_ptr + place, stored, mask=mask)
    tl.store(normed_ptr + place, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward(
    stream_ptr,
    update_ptr,
    gate_state_ptr,
    gate_update_ptr,
    d_total_ptr,
    d_normed_ptr,
    bias_ptr,
    weight_ptr,
    d_stream_ptr,
    d_update_ptr,
    d_gate_state_ptr,
    d_gate_update_ptr,
    partial_bias_ptr,
    partial_weight_ptr,
    N: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCKS: tl.constexpr,
    PROGRAMS: tl.constexpr,
    EPSILON: tl.constexpr,
):
    dtype = stream_ptr.dtype.element_ty
    column = tl.arange(0, COLUMNS)
    inside = column < D
    bias = tl.load(bias_ptr + column, mask=inside, other=0.0)[None, :]
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0)[None, :]
    partial_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    partial_weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in range(tl.program_id(0), BLOCKS, PROGRAMS):
        place, mask = _place(block, column, N, D, ROWS)
        stream = tl.load(stream_ptr + place, mask=mask, other=0.0).to(tl.float32)
        update = tl.load(update_ptr + place, mask=mask, other=0.0).to(tl.float32)
        gate_state = tl.load(gate_state_ptr + place, mask=mask, other=0.0).to(tl.float32)
        gate_update = tl.load(gate_update_ptr + place, mask=mask, other=0.0).to(tl.float32)
        d_total = tl.load(d_total_ptr + place, mask=mask, other=0.0).to(tl.float32)
        d_normed = tl.load(d_normed_ptr + place, mask=mask, other=0.0).to(tl.float32)
        per_h, per_u = _per_row(stream, D, EPSILON), _per_row(update, D, EPSILON)
        gate = tl.sigmoid(per_h * gate_state + per_u * gate_update + bias)
        total = (stream + gate * update).to(dtype).to(tl.float32)
        per_total = _per_row(total, D, EPSILON)

        scaled = per_total * d_normed
        product = scaled * total
        along = tl.sum(product * weight, 1)[:, None]
        d_rows = d_total + scaled * weight - (along * per_total * per_total / D) * total

        d_logit = d_rows * update * (gate * (1.0 - gate))
        pull_h = tl.sum(d_logit * gate_state, 1)[:, None] * per_h * per_h * per_h / D
        pull_u = tl.sum(d_logit * gate_update, 1)[:, None] * per_u * per_u * per_u / D
        tl.store(d_stream_ptr + place, (d_rows - pull_h * stream).to(dtype), mask=mask)
        tl.store(d_update_ptr + place, (d_rows * gate - pull_u * update).to(dtype), mask=mask)
        tl.store(d_gate_state_ptr + place, (per_h * d_logit).to(dtype), mask=mask)
        tl.store(d_gate_update_ptr + place, (per_u * d_logit).to(dtype), mask=mask)
        partial_bias += d_logit
        partial_weight += product
    mine = tl.program_id(0) * D + column
    tl.store(partial_bias_ptr + mine, tl.sum(partial_bias, 0), mask=inside)
    tl.store(partial_weight_ptr + mine, tl.sum(partial_weight, 0), mask=inside)
