"""The two kernels of `nag_update_modulated`: a program takes ROWS rows and visits CHUNK columns of them at a time, as
`nag_update_modulated_gpu` cuts them. GATES is C padded, HALVES the number of arrays whose sum is the weight."""

import triton
import triton.language as tl
from triton.language import constexpr

from pallas_kernels.ops import modulator
from pallas_kernels.ops.triton.nag_update import gradients, growth, orthogonal, turned
from pallas_kernels.ops.triton.tile import load

LEAST_MIXTURE = tl.constexpr(modulator.LEAST_MIXTURE)

# Signatures: pointers in, pointers out, constants.
# fmt: off


@triton.jit
def _chunk(ptr, row, j, N: constexpr, D: constexpr, CHUNK: constexpr):
    column = j * CHUNK + tl.arange(0, CHUNK)
    mask = (row < N)[:, None] & (column < D)[None, :]
    return tl.load(ptr + row.to(tl.int64)[:, None] * D + column[None, :], mask=mask, other=0.0)


@triton.jit
def _half(weight_ptr, half: constexpr, j, D: constexpr, CHUNK: constexpr, GATES: constexpr):
    column = j * CHUNK + tl.arange(0, CHUNK)
    place = (half * D + column)[:, None] * GATES + tl.arange(0, GATES)[None, :]
    return tl.load(weight_ptr + place, mask=(column < D)[:, None], other=0.0)


@triton.jit
def _projected(z, rows, weight_ptr, j, D: constexpr, CHUNK: constexpr, GATES: constexpr, HALVES: constexpr):
    for half in tl.static_range(HALVES):
        z = tl.dot(rows, _half(weight_ptr, half, j, D, CHUNK, GATES), z, input_precision="ieee")
    return z


@triton.jit
def _turn(z, bias_ptr, shares_ptr, settings_ptr, GATES: constexpr):
    gate = tl.arange(0, GATES)
    shares = tl.load(shares_ptr + gate)[None, :]
    beta, alpha = tl.load(settings_ptr), tl.load(settings_ptr + 1)
    gates = tl.sigmoid(z + tl.load(bias_ptr + gate)[None, :])
    mixture = tl.sum(gates * shares, 1)
    log_mixture = tl.log(tl.maximum(mixture, LEAST_MIXTURE))
    modulation = tl.exp(beta * log_mixture)
    return gates, shares, mixture, log_mixture, modulation, beta, alpha


@triton.jit
def forward(
    r_ptr, s_ptr, u_ptr, weight_ptr, bias_ptr, shares_ptr, settings_ptr, out_ptr, s_out_ptr, t_out_ptr,
    N: constexpr, D: constexpr, ROWS: constexpr, CHUNK: constexpr, GATES: constexpr, HALVES: constexpr,
    GROUP: constexpr, COLUMNS: constexpr,
):
    start = tl.program_id(0) * ROWS
    block = tl.arange(0, ROWS)
    row = start + block
    z = tl.zeros((ROWS, GATES), tl.float32)
    for j in range((D + CHUNK - 1) // CHUNK):
        z = _projected(z, _chunk(r_ptr, row, j, N, D, CHUNK), weight_ptr, j, D, CHUNK, GATES, HALVES)
    gate = _turn(z, bias_ptr, shares_ptr, settings_ptr, GATES)
    turn = gate[6] * gate[4]
    tl.store(s_out_ptr + row, load(s_ptr, row, row < N) + 0.5 * growth(turn), mask=row < N)
    tl.store(t_out_ptr + row, turn, mask=row < N)
    column = tl.arange(0, COLUMNS)
    inside = (column < D)[None, :]
    for i in range(ROWS // GROUP):
        some = i * GROUP + tl.arange(0, GROUP)
        t = tl.sum(tl.where(block[:, None] == some[None, :], turn[:, None], 0.0), 0)
        mine = start + some
        place = mine.to(tl.int64)[:, None] * D + column[None, :]
        mask = (mine < N)[:, None] & inside
        r, u = load(r_ptr, place, mask), load(u_ptr, place, mask)
        w, _, _, k, _, _, v = orthogonal(r, u, t, inside, D)
        out = v[:, None] * r + (v * t * k)[:, None] * w
        tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _shifted(u_ptr, row, j, pivot, N: constexpr, D: constexpr, CHUNK: constexpr):
    inside = (j * CHUNK + tl.arange(0, CHUNK) < D)[None, :]
    return tl.where(inside, _chunk(u_ptr, row, j, N, D, CHUNK).to(tl.float32) - pivot[:, None], 0.0), inside


@triton.jit
def backward(
    r_ptr, u_ptr, g_ptr, ds_ptr, d_turn_ptr, weight_ptr, bias_ptr, shares_ptr, settings_ptr,
    dr_ptr, du_ptr, dz_ptr, z_sum_ptr, shares_sum_ptr, settings_out_ptr,
    N: constexpr, D: constexpr, ROWS: constexpr, CHUNK: constexpr, GATES: constexpr, HALVES: constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    valid = row < N
    steps: constexpr = (D + CHUNK - 1) // CHUNK
    part: constexpr = CHUNK if CHUNK < D else D
    # Sums of u itself would cancel if its mean is large, so u is shifted by the mean of one part.
    pivot = tl.sum(_chunk(u_ptr, row, 0, N, D, CHUNK).to(tl.float32), 1) / part
    z = tl.zeros((ROWS, GATES), tl.float32)
    none = tl.zeros((ROWS,), tl.float32)
    mean_u, mean_r, ur, mean_g, gr = none, none, none, none, none
    for j in range(steps):
        stored = _chunk(r_ptr, row, j, N, D, CHUNK)
        z = _projected(z, stored, weight_ptr, j, D, CHUNK, GATES, HALVES)
        r, g = stored.to(tl.float32), _chunk(g_ptr, row, j, N, D, CHUNK).to(tl.float32)
        u, _ = _shifted(u_ptr, row, j, pivot, N, D, CHUNK)
        mean_u += tl.sum(u, 1) / D
        mean_r += tl.sum(r, 1) / D
        ur += tl.sum(u * r, 1) / D
        mean_g += tl.sum(g, 1) / D
        gr += tl.sum(g * r, 1) / D
    a = ur - mean_u * mean_r
    gates, shares, mixture, log_mixture, modulation, beta, alpha = _turn(z, bias_ptr, shares_ptr, settings_ptr, GATES)
    t = alpha * modulation

    rr, wr, q, gw = none, none, none, none
    for i in range(steps):
        j = steps - 1 - i  # in reverse: the last chunks are still in cache
        r = _chunk(r_ptr, row, j, N, D, CHUNK).to(tl.float32)
        g = _chunk(g_ptr, row, j, N, D, CHUNK).to(tl.float32)
        u, inside = _shifted(u_ptr, row, j, pivot, N, D, CHUNK)
        w = tl.where(inside, u - mean_u[:, None], 0.0) - a[:, None] * r
        rr += tl.sum(r * r, 1) / D
        wr += tl.sum(w * r, 1) / D
        q += tl.sum(w * w, 1) / D
        gw += tl.sum(g * w, 1) / D
    k, rn, nn, v = turned(rr, wr, q, t)
    r_g, r_r, r_w, u_g, u_r, u_w, u_1, dt = gradients(a, mean_r, rr, t, mean_g, gr, gw, k, rn, nn, v, D)
    dt += load(ds_ptr, row, valid) * t / (1.0 + t * t) + load(d_turn_ptr, row, valid)

    per_log = alpha * dt * modulation
    clamped = tl.maximum(mixture, LEAST_MIXTURE)
    d_mixture = tl.where(mixture > LEAST_MIXTURE, beta * per_log / clamped, 0.0)[:, None]
    dz = d_mixture * shares * (gates * (1.0 - gates))
    mine = tl.program_id(0) * GATES + tl.arange(0, GATES)
    tl.store(z_sum_ptr + mine, tl.sum(dz, 0))
    tl.store(shares_sum_ptr + mine, tl.sum(d_mixture * gates, 0))
    tl.store(settings_out_ptr + row, per_log * log_mixture, mask=valid)
    tl.store(settings_out_ptr + N + row, dt * modulation, mask=valid)
    pull = dz.to(dz_ptr.dtype.element_ty)
    place = row.to(tl.int64)[:, None] * (HALVES * GATES) + tl.arange(0, GATES)[None, :]
    tl.store(dz_ptr + place, pull, mask=valid[:, None])
    if HALVES == 2:
        low = (dz - pull.to(tl.float32)).to(dz_ptr.dtype.element_ty)
        tl.store(dz_ptr + place + GATES, low, mask=valid[:, None])

    for j in range(steps):
        r = _chunk(r_ptr, row, j, N, D, CHUNK).to(tl.float32)
        g = _chunk(g_ptr, row, j, N, D, CHUNK).to(tl.float32)
        u, inside = _shifted(u_ptr, row, j, pivot, N, D, CHUNK)
        w = tl.where(inside, u - mean_u[:, None], 0.0) - a[:, None] * r
        back = tl.dot(pull, tl.trans(_half(weight_ptr, 0, j, D, CHUNK, GATES)), input_precision="ieee")
        dr = r_g[:, None] * g + r_r[:, None] * r + r_w[:, None] * w + back
        du = u_g[:, None] * g + u_r[:, None] * r + u_w[:, None] * w + u_1[:, None]
        column = j * CHUNK + tl.arange(0, CHUNK)
        there = row.to(tl.int64)[:, None] * D + column[None, :]
        mask = valid[:, None] & inside
        tl.store(dr_ptr + there, dr.to(dr_ptr.dtype.element_ty), mask=mask)
        tl.store(du_ptr + there, du.to(du_ptr.dtype.element_ty), mask=mask)
