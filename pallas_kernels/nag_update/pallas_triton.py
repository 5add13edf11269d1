"""`nag_update` on GPU through Pallas-Triton: a few whole rows per program, one visit each.

Why this exists: one pass forward (2 tensors read, 1 written) and one backward (3 read, 2 written).
Numerics: rows are widened to float32 in registers and rounded once on the way out.
Backend: see `triton_tile`. JAX has announced the end of Pallas-Triton: the arithmetic is in `block.py`.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels import triton_tile
from pallas_kernels.nag_update import algebra, block
from pallas_kernels.nag_update.cost import estimate

PLATFORMS = triton_tile.PLATFORMS


def refusal(direction, log_norm, update, turn) -> str | None:
    return triton_tile.refusal(direction=direction, update=update)


def forward(direction, log_norm, update, turn):
    def kernel(tile, r, s, u, t, out, s_out):
        turns = tile.load(t)
        tile.store(out, block.forward(tile.load(r), tile.load(u), turns[:, None], tile.width, tile.inside))
        tile.store(s_out, algebra.grown(tile.load(s), turns))

    (n, width), inputs = direction.shape, (direction, log_norm, update, turn)
    cost = estimate(n, width, direction.dtype)
    like = direction, log_norm
    return tuple(triton_tile.launch(kernel, n, width, inputs, like, cost, "nag_update_forward")), ()


def backward(residuals, cotangents):
    direction, update, turn = residuals
    g, ds = cotangents

    def kernel(tile, r, u, t, g, ds, *outs):
        turns = tile.load(t)
        rows = (tile.load(x) for x in (r, u, g))
        dr, du, dt = block.backward(*rows, turns[:, None], tile.width, tile.inside)
        lane = algebra.log_lane_gradient(tile.load(ds), turns)
        for ref, value in zip(outs, (dr, du, jnp.sum(dt, axis=1) + lane), strict=True):
            tile.store(ref, value)

    (n, width), inputs = direction.shape, (direction, update, turn, g, ds)
    cost = estimate(n, width, direction.dtype, backward=True)
    dr, du, dt = triton_tile.launch(kernel, n, width, inputs, residuals, cost, "nag_update_backward")
    return dr, ds, du, dt
