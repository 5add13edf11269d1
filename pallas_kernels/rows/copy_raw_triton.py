"""Move rows by index on GPU by raw Triton kernels: what stays when JAX drops Pallas-Triton."""

from __future__ import annotations

import jax

from pallas_kernels import raw_triton


def take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """`x[indices]`."""
    from pallas_kernels.rows import copy_triton_kernels as kernels

    out = jax.ShapeDtypeStruct((indices.shape[0], x.shape[1]), x.dtype)
    shape, options = raw_triton.row_blocks(*out.shape)
    return raw_triton.call(kernels.take, (x, indices), (out,), "take_rows", **options, **shape)[0]


def put(x: jax.Array, rows: jax.Array, indices: jax.Array) -> jax.Array:
    """`x` with `rows` at `indices`, in its own memory."""
    from pallas_kernels.rows import copy_triton_kernels as kernels

    shape, options = raw_triton.row_blocks(*rows.shape)
    inputs = rows, indices
    return raw_triton.call_in_place(kernels.put, kernels.put_aliased, x, inputs, "put_rows", **options, **shape)
