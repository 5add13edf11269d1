"""The two kernels of `nag_update`: one program takes ROWS rows and visits each once."""

import triton
import triton.language as tl
from triton.language import constexpr

from pallas_kernels.ops import nag_update as op
from pallas_kernels.ops.triton.tile import load, tile

EPS_UPDATE, EPS_NORM = tl.constexpr(op.EPS_UPDATE), tl.constexpr(op.EPS_NORM)

# Signatures: pointers in, pointers out, constants.
# fmt: off


@triton.jit
def orthogonal(r, u, t, inside, D: constexpr):
    mean = tl.sum(u, 1) / D
    c = tl.where(inside, u - mean[:, None], 0.0)
    a = tl.sum(c * r, 1) / D
    w = c - a[:, None] * r
    rr, wr, q = tl.sum(r * r, 1) / D, tl.sum(w * r, 1) / D, tl.sum(w * w, 1) / D
    k, rn, nn, v = turned(rr, wr, q, t)
    return w, a, rr, k, rn, nn, v


@triton.jit
def turned(rr, wr, q, t):
    k = 1.0 / tl.sqrt(q + EPS_UPDATE)
    rn, nn = k * wr, k * q * k
    v = 1.0 / tl.sqrt(rr + 2.0 * t * rn + t * t * nn + EPS_NORM)
    return k, rn, nn, v


@triton.jit
def growth(t):
    """log(1 + t^2), by its series for small t, where 1 + t^2 would lose digits."""
    square = t * t
    return tl.where(square < 1e-3, square * (1.0 - square * (0.5 - square / 3.0)), tl.log(1.0 + square))


@triton.jit
def gradients(a, mr, rr, t, mg, gr, gw, k, rn, nn, v, D: constexpr):
    kt = k * t
    gn = k * gw
    still = v * v * EPS_NORM > 0.5
    pull = tl.where(still, 0.0, v * v * (v * (gr + t * gn)))
    v = tl.where(still, 1.0, v)
    dy_n = v * gn - pull * (rn + t * nn)
    dy_r = v * gr - pull * (rr + t * rn)
    live = nn > 0.5
    gain, along = tl.where(live, kt, t), tl.where(live, dy_n, 0.0)
    dw_r = gain * (dy_r - rn * along)
    y_w = -pull * kt
    w_g, w_r, w_w = gain * v, -gain * pull, gain * (y_w - k * along)
    r_g, r_r, r_w = v - a * w_g, -pull - a * w_r - a * dw_r, y_w - a * w_w - dw_r
    u_r = w_r - dw_r
    u_1 = -(w_g * mg + (u_r - a * w_w) * mr)
    return r_g, r_r, r_w, w_g, u_r, w_w, u_1, dy_n * D


@triton.jit
def forward(
    r_ptr, u_ptr, s_ptr, t_ptr, out_ptr, s_out_ptr,
    N: constexpr, D: constexpr, ROWS: constexpr, COLUMNS: constexpr,
):
    row, valid, column, place, mask = tile(tl.program_id(0), N, D, ROWS, COLUMNS)
    r, u, t = load(r_ptr, place, mask), load(u_ptr, place, mask), load(t_ptr, row, valid)
    w, _, _, k, _, _, v = orthogonal(r, u, t, (column < D)[None, :], D)
    out = v[:, None] * r + (v * t * k)[:, None] * w
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mask)
    tl.store(s_out_ptr + row, load(s_ptr, row, valid) + 0.5 * growth(t), mask=valid)


@triton.jit
def backward(
    r_ptr, u_ptr, g_ptr, t_ptr, ds_ptr, dr_ptr, du_ptr, dt_ptr,
    N: constexpr, D: constexpr, ROWS: constexpr, COLUMNS: constexpr,
):
    row, valid, column, place, mask = tile(tl.program_id(0), N, D, ROWS, COLUMNS)
    r, u, g = load(r_ptr, place, mask), load(u_ptr, place, mask), load(g_ptr, place, mask)
    t = load(t_ptr, row, valid)
    w, a, rr, k, rn, nn, v = orthogonal(r, u, t, (column < D)[None, :], D)
    mr, mg = tl.sum(r, 1) / D, tl.sum(g, 1) / D
    gr, gw = tl.sum(g * r, 1) / D, tl.sum(g * w, 1) / D
    r_g, r_r, r_w, u_g, u_r, u_w, u_1, dt = gradients(a, mr, rr, t, mg, gr, gw, k, rn, nn, v, D)
    dr = r_g[:, None] * g + r_r[:, None] * r + r_w[:, None] * w
    du = u_g[:, None] * g + u_r[:, None] * r + u_w[:, None] * w + u_1[:, None]
    tl.store(dr_ptr + place, dr.to(dr_ptr.dtype.element_ty), mask=mask)
    tl.store(du_ptr + place, du.to(du_ptr.dtype.element_ty), mask=mask)
    tl.store(dt_ptr + row, dt + load(ds_ptr, row, valid) * t / (1.0 + t * t), mask=valid)
