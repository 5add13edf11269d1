"""The two kernels of `review_update`."""

import triton
import triton.language as tl
from triton.language import constexpr

from pallas_kernels.ops.triton.tile import inverse_rms, load, tile, vector

# Signatures: pointers in, pointers out, constants.
# fmt: off


@triton.jit
def forward(
    stream_ptr, update_ptr, gate_state_ptr, gate_update_ptr, bias_ptr, weight_ptr, total_ptr, normed_ptr,
    N: constexpr, D: constexpr, ROWS: constexpr, COLUMNS: constexpr, EPSILON: constexpr,
):
    _, _, column, place, mask = tile(tl.program_id(0), N, D, ROWS, COLUMNS)
    bias, weight = vector(bias_ptr, column, D), vector(weight_ptr, column, D)
    stream, update = load(stream_ptr, place, mask), load(update_ptr, place, mask)
    gate_state, gate_update = load(gate_state_ptr, place, mask), load(gate_update_ptr, place, mask)
    per_h, per_u = inverse_rms(stream, D, EPSILON), inverse_rms(update, D, EPSILON)
    gate = tl.sigmoid(per_h * gate_state + per_u * gate_update + bias)
    stored = (stream + gate * update).to(total_ptr.dtype.element_ty)
    total = stored.to(tl.float32)
    normed = weight * (total * inverse_rms(total, D, EPSILON))
    tl.store(total_ptr + place, stored, mask=mask)
    tl.store(normed_ptr + place, normed.to(normed_ptr.dtype.element_ty), mask=mask)


@triton.jit
def backward(
    stream_ptr, update_ptr, gate_state_ptr, gate_update_ptr, d_total_ptr, d_normed_ptr, bias_ptr, weight_ptr,
    d_stream_ptr, d_update_ptr, d_gate_state_ptr, d_gate_update_ptr, partial_bias_ptr, partial_weight_ptr,
    N: constexpr, D: constexpr, ROWS: constexpr, COLUMNS: constexpr,
    BLOCKS: constexpr, PROGRAMS: constexpr, EPSILON: constexpr,
):
    dtype = stream_ptr.dtype.element_ty
    column = tl.arange(0, COLUMNS)
    bias, weight = vector(bias_ptr, column, D), vector(weight_ptr, column, D)
    partial_bias = tl.zeros((ROWS, COLUMNS), tl.float32)
    partial_weight = tl.zeros((ROWS, COLUMNS), tl.float32)
    for block in range(tl.program_id(0), BLOCKS, PROGRAMS):
        _, _, _, place, mask = tile(block, N, D, ROWS, COLUMNS)
        stream, update = load(stream_ptr, place, mask), load(update_ptr, place, mask)
        gate_state, gate_update = load(gate_state_ptr, place, mask), load(gate_update_ptr, place, mask)
        d_total, d_normed = load(d_total_ptr, place, mask), load(d_normed_ptr, place, mask)
        per_h, per_u = inverse_rms(stream, D, EPSILON), inverse_rms(update, D, EPSILON)
        gate = tl.sigmoid(per_h * gate_state + per_u * gate_update + bias)
        total = (stream + gate * update).to(dtype).to(tl.float32)
        per_total = inverse_rms(total, D, EPSILON)

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
    tl.store(partial_bias_ptr + mine, tl.sum(partial_bias, 0), mask=column < D)
    tl.store(partial_weight_ptr + mine, tl.sum(partial_weight, 0), mask=column < D)
