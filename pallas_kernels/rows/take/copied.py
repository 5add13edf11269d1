"""Forward and backward of `take_rows` from any module that can `take` and `put` flat rows."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import jax.numpy as jnp

from pallas_kernels.rows.flat import flat, flat_indices


def by(copies: ModuleType) -> tuple[Callable, Callable]:
    """`(forward, backward)`."""

    def forward(x, indices, *, rows: int):
        taken = copies.take(flat(x), flat_indices(indices, rows))
        return (taken.reshape(*indices.shape, x.shape[-1]),), ()

    def backward(residuals, cotangents, *, rows: int):
        (indices,), (g,) = residuals, cotangents
        groups, width = indices.shape[0], g.shape[-1]
        into = jnp.zeros((groups * rows, width), g.dtype)
        return (copies.put(into, flat(g), flat_indices(indices, rows)).reshape(groups, rows, width),)

    return forward, backward
