"""The NAG update as a linear combination of rows, with scalars from a few row means.

Why this exists: everything the update and its gradients write is a sum of three rows, r, g = dr' and w, the
part of the update orthogonal to r, with one factor per row. So an implementation needs a few row means and
one elementwise round, and all backends share the algebra below. Means and sums are taken of w itself: from
the moments of r and u they would cancel when an update is nearly parallel to its direction, and r' would lose
its unit RMS. Scalars have any shape, the same for all.

With <x> the row mean, c = u - <u>, a = <c r>, w = c - a r, q = <w^2>, k = 1 / sqrt(q + eps), n = k w:
    y = r + t n                        r' = v y,  v = 1 / sqrt(<y^2> + eps)
    dy = v (g - r' <g r'>)             dt = <dy n> D + ds t / (1 + t^2)
    dw = k t (dy - n <dy n>)           dr = dy - a dw - <dw r> c
    dc = dw - <dw r> r                 du = dc - <dc>
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.nag_update.constants import EPS_NORM, EPS_UPDATE

Row = Float[Array, "..."]


class Turned(NamedTuple):
    """r' = v r + on_w w, and what the backward pass needs of it."""

    v: Row
    on_w: Row
    k: Row
    rn: Row  # <r n>: zero but for rounding, for a unit direction
    nn: Row  # <n^2>: one, unless the update has nothing to give


def turned(rr: Row, wr: Row, q: Row, t: Row) -> Turned:
    """From <r^2>, <w r>, <w^2> and the turn."""
    k = jax.lax.rsqrt(q + EPS_UPDATE)
    rn, nn = k * wr, (k * q) * k
    v = jax.lax.rsqrt(rr + 2 * t * rn + t * t * nn + EPS_NORM)
    return Turned(v, v * t * k, k, rn, nn)


def grown(log_norm: Row, t: Row) -> Row:
    """The log lane after the turn."""
    return log_norm + 0.5 * jnp.log1p(t * t)


class Gradients(NamedTuple):
    """dr = r_g g + r_r r + r_w w; du = u_g g + u_r r + u_w w + u_1; and dt but for the log lane."""

    r_g: Row
    r_r: Row
    r_w: Row
    u_g: Row
    u_r: Row
    u_w: Row
    u_1: Row
    dt: Row


def gradients(state: Turned, a: Row, mr: Row, rr: Row, t: Row, mg: Row, gr: Row, gw: Row, d: int) -> Gradients:
    """From the forward scalars, a, <r>, <r^2> and the turn, and <g>, <g r>, <g w> of the cotangent."""
    v, _, k, rn, nn = state
    kt, gn = k * t, k * gw
    pull = v * v * (v * (gr + t * gn))  # dy = v g - pull y
    dy_n = v * gn - pull * (rn + t * nn)
    dy_r = v * gr - pull * (rr + t * rn)
    dw_r = kt * (dy_r - rn * dy_n)
    y_w = -pull * kt
    w_g, w_r, w_w = kt * v, -kt * pull, kt * (y_w - k * dy_n)
    u_r = w_r - dw_r
    return Gradients(
        r_g=v - a * w_g,
        r_r=-pull - a * w_r - a * dw_r,
        r_w=y_w - a * w_w - dw_r,
        u_g=w_g,
        u_r=u_r,
        u_w=w_w,
        u_1=-(w_g * mg + (u_r - a * w_w) * mr),  # <w> = -a <r>
        dt=dy_n * d,
    )


def log_lane_gradient(ds: Row, t: Row) -> Row:
    """What the log lane adds to dt."""
    return ds * t / (1 + t * t)
