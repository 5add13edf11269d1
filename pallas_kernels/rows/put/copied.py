"""Forward and backward of `put_rows` from any module that can `take` and `put` flat rows."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import jax.numpy as jnp

from pallas_kernels.rows.flat import flat, flat_indices


def by(copies: ModuleType) -> tuple[Callable, Callable]:
    """`(forward, backward)`."""

    def forward(x, rows, indices):
        where = flat_indices(indices, x.shape[1])
        return (copies.put(flat(x), flat(rows), where).reshape(x.shape),), ()

    def backward(residuals, cotangents):
        (indices,), (g,) = residuals, cotangents
        where = flat_indices(indices, g.shape[1])
        replaced = copies.take(flat(g), where)
        kept = copies.put(flat(g), jnp.zeros_like(replaced), where)
        return kept.reshape(g.shape), replaced.reshape(*indices.shape, g.shape[-1])

    return forward, backward
