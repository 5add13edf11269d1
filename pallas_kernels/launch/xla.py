"""Row kernels left to XLA: the body on all rows at once, in float32 (float64 for float64 rows).

What a CPU runs, and what a platform without a fitting kernel uses. The backward pass reads what the op saves and
nothing else, where JAX's derivative of the reference keeps and rereads several `[N, D]` intermediates.
"""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.launch import Arrays, Block, Results, RowKernel

PLATFORMS = None
bytes_moved = None  # as many as XLA likes


def refusal(kernel: RowKernel, *rows) -> None:
    return None


def unavailable(platform: str) -> None:
    return None


def rows_call(
    kernel: RowKernel, rows: Arrays, scalars: Arrays = (), vectors: Arrays = (), *, like: Arrays = (), **constants
) -> Results:
    """Outputs are typed as the first rows, but gradients are left as exact as they are."""
    exact = jnp.promote_types(jnp.result_type(*rows), jnp.float32)
    block = Block(rows[0].shape[-1], rows[0].dtype, everything=True)
    read, given = [scalars[i][:, None] for i in kernel.reads], [v.astype(exact)[None] for v in vectors]
    outputs, computed, summands = kernel.body(block, [x.astype(exact) for x in rows], read, given, **constants)
    if kernel.verb == "forward":
        outputs = [x.astype(block.dtype) for x in outputs]
    lane = kernel.lane(scalars, [x[:, 0] for x in computed])
    return tuple(outputs), tuple(lane), tuple(jnp.sum(x, axis=0) for x in summands)
