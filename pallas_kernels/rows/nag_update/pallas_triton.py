"""`nag_update_rows` on GPU through Pallas-Triton: take, update and put are one kernel, forward and backward.

Why this exists: a selected row is read once and written once, into the memory of the stream; the rows in
between never exist. The old rows are written out for the backward pass, which turns the incoming gradient of
the selected rows into that of the old ones, in place too. Numerics and backend: as
`nag_update.pallas_triton`.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels import triton_tile
from pallas_kernels.nag_update import algebra, block
from pallas_kernels.rows.cost import estimate
from pallas_kernels.rows.flat import flat, flat_indices

PLATFORMS = triton_tile.PLATFORMS


def refusal(direction, log_norm, update, turn, indices) -> str | None:
    return triton_tile.refusal(direction=direction, update=update)


def forward(direction, log_norm, update, turn, indices):
    def kernel(tile, r, s, u, t, i, out, s_out, saved):
        there, turns = tile.at(i), tile.load(t)
        old = there.load(r)
        tile.store(saved, old)
        there.store(out, block.forward(old, tile.load(u), turns[:, None], tile.width, tile.inside))
        there.store(s_out, algebra.grown(there.load(s), turns))

    r, u, s = flat(direction), flat(update), log_norm.reshape(-1)
    inputs = r, s, u, turn.reshape(-1), flat_indices(indices, direction.shape[1])
    saved = jnp.empty_like(u, dtype=direction.dtype)
    cost = estimate(u, tensors=4, scalars=4, flops=16)
    out, s_out, saved = triton_tile.launch(
        kernel, *u.shape, inputs, (r, s, saved), cost, "nag_update_rows_forward", {0: 0, 1: 1}
    )
    return (out.reshape(direction.shape), s_out.reshape(log_norm.shape)), (saved.reshape(update.shape),)


def backward(residuals, cotangents):
    update, turn, indices, selected = residuals
    g, ds = cotangents

    def kernel(tile, r, u, t, i, g, ds, dr_out, du_out, dt_out):
        there, turns = tile.at(i), tile.load(t)
        rows = tile.load(r), tile.load(u), there.load(g)
        dr, du, dt = block.backward(*rows, turns[:, None], tile.width, tile.inside)
        there.store(dr_out, dr)
        tile.store(du_out, du)
        tile.store(dt_out, jnp.sum(dt, axis=1) + algebra.log_lane_gradient(there.load(ds), turns))

    u, turns, where = flat(update), turn.reshape(-1), flat_indices(indices, g.shape[1])
    inputs = flat(selected), u, turns, where, flat(g), ds.reshape(-1)
    cost = estimate(u, tensors=5, scalars=4, flops=35)
    dr, du, dt = triton_tile.launch(
        kernel, *u.shape, inputs, (flat(g), u, turns), cost, "nag_update_rows_backward", {4: 0}
    )
    return dr.reshape(g.shape), ds, du.reshape(update.shape), dt.reshape(turn.shape)
