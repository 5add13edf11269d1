"""Gathers tokens of a stream by index and puts them back, for Mixture-of-Depths."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from pallas_kernels import put_rows, take_rows


def take(tree: Any, indices: Int[Array, "B k"]) -> Any:
    """The rows of every leaf [B, T, ...] at the indices, [B, k, ...]. Indices must be in range and unique within a
    sequence."""

    def leaf(x):
        if x.ndim == 2 or not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.take_along_axis(x, _beside(indices, x), axis=1, mode="promise_in_bounds")
        picked = take_rows(x.reshape(*x.shape[:2], math.prod(x.shape[2:])), indices)
        return picked.reshape(*indices.shape, *x.shape[2:])

    return jax.tree.map(leaf, tree)


def _beside(indices: Int[Array, "B k"], x: Array) -> Int[Array, "B k ..."]:
    return indices.reshape(*indices.shape, *[1] * (x.ndim - 2))


def put(tree: Any, rows: Any, indices: Int[Array, "B k"]) -> Any:
    """Every leaf [B, T, ...] of `tree`, with the rows at the indices replaced by those of `rows`, [B, k, ...]."""

    def leaf(x, new):
        if x.ndim == 2 or not jnp.issubdtype(x.dtype, jnp.floating):
            return jnp.put_along_axis(x, _beside(indices, x), new, axis=1, inplace=False, mode="promise_in_bounds")
        width = math.prod(x.shape[2:])
        flat = put_rows(x.reshape(*x.shape[:2], width), new.reshape(*indices.shape, width), indices)
        return flat.reshape(x.shape)

    return jax.tree.map(leaf, tree, rows)
