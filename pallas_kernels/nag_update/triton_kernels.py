"""The two raw Triton kernels of `nag_update`. Imports triton: only `triton.py` beside it and the kernels of
`nag_update_modulated` may import this file.

One program takes ROWS rows of COLUMNS >= D columns, both powers of two, and visits each once. The algebra is that
of `algebra.py`, in the same order.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(N: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, D: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)
    place = row.to(tl.int64)[:, None] * D + column[None, :]
    inside = (column < D)[None, :]
    return row, row < N, place, inside


@triton.jit
def orthogonal(r, u, t, inside, D: tl.constexpr, EPS_UPDATE: tl.constexpr, EPS_NORM: tl.constexpr):
    mean = tl.sum(u, 1) / D
    c = tl.where(inside, u - mean[:, None], 0.0)
    a = tl.sum(c * r, 1) / D
    w = c - a[:, None] * r
    rr, wr, q = tl.sum(r * r, 1) / D, tl.sum(w * r, 1) / D, tl.sum(w * w, 1) / D
    k = 1.0 / tl.sqrt(q + EPS_UPDATE)
    rn, nn = k * wr, k * q * k
    v = 1.0 / tl.sqrt(rr + 2.0 * t * rn + t * t * nn + EPS_NORM)
    return w, a, rr, k, rn, nn, v


@triton.jit
def growth(t):
    """log(1 + t^2) without losing small turns: the series where the square leaves few digits."""
    square = t * t
    return tl.where(square < 1e-3, square * (1.0 - square * (0.5 - square / 3.0)), tl.log(1.0 + square))


@triton.jit
def gradients(a, mr, rr, t, mg, gr, gw, k, rn, nn, v, D: tl.constexpr):
    """As `algebra.gradients`."""
    kt = k * t
    gn = k * gw
    pull = v * v * (v * (gr + t * gn))
    dy_n = v * gn - pull * (rn + t * nn)
    dy_r = v * gr - pull * (rr + t * rn)
    dw_r = kt * (dy_r - rn * dy_n)
    y_w = -pull * kt
    w_g, w_r, w_w = kt * v, -kt * pull, kt * (y_w - k * dy_n)
    r_g, r_r, r_w = v - a * w_g, -pull - a * w_r - a * dw_r, y_w - a * w_w - dw_r
    u_r = w_r - dw_r
    u_1 = -(w_g * mg + (u_r - a * w_w) * mr)
    return r_g, r_r, r_w, w_g, u_r, w_w, u_1, dy_n * D


@triton.jit
def forward(
    r_ptr,
    s_ptr,
    u_ptr,
    t_ptr,
    out_ptr,
    s_out_ptr,
    N: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EPS_UPDATE: tl.constexpr,
    EPS_NORM: tl.constexpr,
):
    row, valid, place, inside = _tile(N, ROWS, COLUMNS, D)
    mask = valid[:, None] & inside
    r = tl.load(r_ptr + place, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + place, mask=mask, other=0.0).to(tl.float32)
    t = tl.load(t_ptr + row, mask=valid, other=0.0)
    w, _, _, k, _, _, v = orthogonal(r, u, t, inside, D, EPS_UPDATE, EPS_NORM)
    out = v[:, None] * r + (v * t * k)[:, None] * w
    tl.store(out_ptr + place, out.to(out_ptr.dtype.element_ty), mask=mask)
    s = tl.load(s_ptr + row, mask=valid, other=0.0)
    tl.store(s_out_ptr + row, s + 0.5 * growth(t), mask=valid)


@triton.jit
def backward(
    r_ptr,
    u_ptr,
    t_ptr,
    g_ptr,
    ds_ptr,
    dr_ptr,
    du_ptr,
    dt_ptr,
    N: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EPS_UPDATE: tl.constexpr,
    EPS_NORM: tl.constexpr,
):
    row, valid, place, inside = _tile(N, ROWS, COLUMNS, D)
    mask = valid[:, None] & inside
    r = tl.load(r_ptr + place, mask=mask, other=0.0).to(tl.float32)
    u = tl.load(u_ptr + place, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + place, mask=mask, other=0.0).to(tl.float32)
    t = tl.load(t_ptr + row, mask=valid, other=0.0)
    w, a, rr, k, rn, nn, v = orthogonal(r, u, t, inside, D, EPS_UPDATE, EPS_NORM)
    mr, mg = tl.sum(r, 1) / D, tl.sum(g, 1) / D
    gr, gw = tl.sum(g * r, 1) / D, tl.sum(g * w, 1) / D
    r_g, r_r, r_w, u_g, u_r, u_w, u_1, dt = gradients(a, mr, rr, t, mg, gr, gw, k, rn, nn, v, D)
    dr = r_g[:, None] * g + r_r[:, None] * r + r_w[:, None] * w
    du = u_g[:, None] * g + u_r[:, None] * r + u_w[:, None] * w + u_1[:, None]
    tl.store(dr_ptr + place, dr.to(dr_ptr.dtype.element_ty), mask=mask)
    tl.store(du_ptr + place, du.to(du_ptr.dtype.element_ty), mask=mask)
    ds = tl.load(ds_ptr + row, mask=valid, other=0.0)
    tl.store(dt_ptr + row, dt + ds * t / (1.0 + t * t), mask=valid)
