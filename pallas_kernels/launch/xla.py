"""Row kernels compiled by XLA: the body on all rows at once, in float32 (float64 for float64 rows).

For CPUs, and for platforms without a suitable kernel. The backward pass reads only what the op saves, while JAX's
derivative of the reference would save and reread several `[N, D]` intermediates.
"""

import jax.numpy as jnp

from pallas_kernels.launch import Arrays, Block, Results, RowKernel

PLATFORMS = None
bytes_moved = None  # XLA decides


def refusal(kernel: RowKernel, *rows) -> None:
    return None


def unavailable(platform: str) -> None:
    return None


def rows_call(
    kernel: RowKernel, rows: Arrays, scalars: Arrays = (), vectors: Arrays = (), *, like: Arrays = (), **constants
) -> Results:
    """Runs `kernel` over all rows. Outputs of a forward pass are typed as the first rows; gradients are not rounded."""
    exact = jnp.promote_types(jnp.result_type(*rows), jnp.float32)
    block = Block(rows[0].shape[-1], rows[0].dtype, everything=True)
    read, given = [scalars[i][:, None] for i in kernel.reads], [v.astype(exact)[None] for v in vectors]
    outputs, computed, summands = kernel.body(block, [x.astype(exact) for x in rows], read, given, **constants)
    if kernel.verb == "forward":
        outputs = [x.astype(block.dtype) for x in outputs]
    lane = kernel.lane(scalars, [x[:, 0] for x in computed])
    return tuple(outputs), tuple(lane), tuple(jnp.sum(x, axis=0) for x in summands)
