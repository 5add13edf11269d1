"""Move rows by index on GPU through Pallas-Triton: flat arrays, one program for a few rows, indices read on chip."""

from __future__ import annotations

import jax

from pallas_kernels import triton_tile
from pallas_kernels.rows.cost import estimate


def take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """`x[indices]`."""

    def kernel(tile, x_ref, i_ref, out):
        tile.store(out, tile.at(i_ref).load(x_ref, x.dtype))

    out = jax.ShapeDtypeStruct((indices.shape[0], x.shape[1]), x.dtype)
    return triton_tile.launch(kernel, *out.shape, (x, indices), (out,), estimate(out), "take_rows")[0]


def put(x: jax.Array, rows: jax.Array, indices: jax.Array) -> jax.Array:
    """`x` with `rows` at `indices`, in its own memory."""

    def kernel(tile, x_ref, rows_ref, i_ref, out):
        tile.at(i_ref).store(out, tile.load(rows_ref, x.dtype))

    inputs = x, rows, indices
    return triton_tile.launch(kernel, *rows.shape, inputs, (x,), estimate(rows), "put_rows", {0: 0})[0]
