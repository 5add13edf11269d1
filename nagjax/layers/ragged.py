"""Ragged matmuls: rows that are sorted by group, times one matrix per group.

Why this exists: `jax.lax.ragged_dot` has an instruction on a TPU; on a CPU and on NVIDIA's GPUs (jax 0.11.2) it
multiplies every row with the matrices of all groups and masks the results. On such a GPU this module uses the kernels
of `nagjax.layers.grouped`. On a CPU it loops over blocks of rows, each of one group: a block may reach into the rows of
the next group, whose own blocks come later and overwrite them.

Numerics: on a CPU matmuls and their sums in the dtype of the rows, as in `nagjax.layers.cpu`; kernels sum in float32.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from nagjax.layers.grouped import grouped_matmul, usable
from nagjax.layers.int8 import Quantized
from nagjax.layers.platform import platform
from pallas_kernels.placement import alike

BLOCK = 128  # most rows of a block; larger blocks waste more at the end of a group


def ragged_matmul(
    rows: Float[Array, "N m"], matrices: Float[Array, "E m n"] | Quantized, sizes: Int[Array, " E"]
) -> Float[Array, "N n"]:
    """`rows[i] W[e]` for the group e of row i, in the dtype of rows. The first `sizes[0]` rows are group 0, the next
    `sizes[1]` rows group 1, and so on; rows after the last group give 0."""
    int8 = isinstance(matrices, Quantized)
    if platform() == "cpu":
        return _multiplied(rows, matrices, sizes, 0) if int8 else _in_blocks(*alike((rows, matrices), (sizes,)), sizes)
    inside = jnp.arange(rows.shape[0])[:, None] < jnp.sum(sizes)
    clean = jnp.where(inside, rows, 0)
    if int8:
        done = _quantized(clean, matrices, sizes)
    elif usable():
        done = grouped_matmul(clean, matrices, sizes)
    else:
        done = jax.lax.ragged_dot(clean, matrices, sizes, preferred_element_type=rows.dtype)
    return jnp.where(inside, done, 0)


def _quantized(rows, matrices: Quantized, sizes):
    """Without a gradient, as products with quantised matrices are."""
    sums = jax.lax.ragged_dot(rows, matrices.values.astype(rows.dtype), sizes, preferred_element_type=jnp.float32)
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows.shape[0]), side="right")
    return (sums * matrices.scale[:, 0].at[group].get(mode="fill", fill_value=0.0)).astype(rows.dtype)


class Blocks(NamedTuple):
    """The first row and the group of each block, the number of its rows that belong to the group, and the number of
    blocks in use."""

    starts: Int[Array, " n"]
    groups: Int[Array, " n"]
    filled: Int[Array, " n"]
    count: Int[Array, ""]


def _size(rows: int, groups: int) -> int:
    return min(BLOCK, max(8, -(-rows // groups)))


def _blocks(sizes: Int[Array, " E"], rows: int) -> Blocks:
    size = _size(rows, sizes.shape[0])
    most = rows // size + sizes.shape[0]
    each = -(-sizes // size)
    ends = jnp.cumsum(each)
    block = jnp.arange(most)
    groups = jnp.minimum(jnp.searchsorted(ends, block, side="right"), sizes.shape[0] - 1)
    inside = (block - (ends - each)[groups]) * size
    starts = (jnp.cumsum(sizes) - sizes)[groups] + inside
    return Blocks(starts, groups, jnp.clip(sizes[groups] - inside, 0, size), ends[-1])


def _over_blocks(sizes: Int[Array, " E"], rows: int, start: Array, step: Callable, like: Sequence[Array]) -> Array:
    """Folds `step(carry, first row, group, which of the block's rows belong to the group)` over the blocks in use.
    `like`: the arrays that `step` reads."""
    blocks, size = _blocks(sizes, rows), _size(rows, sizes.shape[0])
    (start,) = alike((start,), like)

    def one(i, carry):
        own: Bool[Array, "b 1"] = jnp.arange(size)[:, None] < blocks.filled[i]
        return step(carry, blocks.starts[i], blocks.groups[i], own)

    return jax.lax.fori_loop(0, blocks.count, one, start)


def _padded(rows: Float[Array, "N m"], groups: int) -> Float[Array, "M m"]:
    return jnp.pad(rows, ((0, _size(rows.shape[0], groups)), (0, 0)))


@jax.custom_vjp
def _in_blocks(rows, matrices, sizes):
    return _multiplied(rows, matrices, sizes, 0)


def _multiplied(rows, matrices, sizes, along: int) -> Array:
    """Each row times its group's matrix, summed over the matrix's axis `along`."""
    count, size = rows.shape[0], _size(rows.shape[0], sizes.shape[0])
    padded = _padded(rows, sizes.shape[0])

    def step(done, start, group, own):
        block = jax.lax.dynamic_slice_in_dim(padded, start, size)
        weight = jax.tree.map(lambda own: jax.lax.dynamic_index_in_dim(own, group, keepdims=False), matrices)
        if isinstance(weight, Quantized):
            product = weight.product(block, along)
        else:
            product = jax.lax.dot_general(block, weight, (((1,), (along,)), ((), ())))
        return jax.lax.dynamic_update_slice_in_dim(done, jnp.where(own, product, 0), start, 0)

    empty = jnp.zeros((padded.shape[0], matrices.shape[2 - along]), rows.dtype)
    return _over_blocks(sizes, count, empty, step, (rows, *jax.tree.leaves(matrices), sizes))[:count]


def _forward(rows, matrices, sizes):
    return _in_blocks(rows, matrices, sizes), (rows, matrices, sizes)


def _backward(kept, given):
    rows, matrices, sizes = kept
    count, size = rows.shape[0], _size(rows.shape[0], sizes.shape[0])
    padded, cotangents = _padded(rows, sizes.shape[0]), _padded(given, sizes.shape[0])

    def step(total, start, group, own):
        block = jnp.where(own, jax.lax.dynamic_slice_in_dim(padded, start, size), 0)
        back = jax.lax.dynamic_slice_in_dim(cotangents, start, size)
        added = jax.lax.dot_general(block, back, (((0,), (0,)), ((), ())))
        before = jax.lax.dynamic_index_in_dim(total, group, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(total, before + added, group, 0)

    by_matrix = _over_blocks(sizes, count, jnp.zeros_like(matrices), step, (rows, given, sizes))
    return _multiplied(given, matrices, sizes, 1), by_matrix, None


_in_blocks.defvjp(_forward, _backward)
