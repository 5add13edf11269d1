"""Indices out of range or twice the same: undefined by contract, found by a check while debugging."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

import jax
import numpy as np

_checking: ContextVar[bool] = ContextVar("check_indices", default=False)


@contextlib.contextmanager
def checking_indices(on: bool = True) -> Iterator[None]:
    """Check the indices of row ops traced inside: ValueError at once, or (inside jit) when the program
    runs."""
    token = _checking.set(on)
    try:
        yield
    finally:
        _checking.reset(token)


def check_indices(op: str, indices: jax.Array, rows: int) -> None:
    """Does nothing unless inside `checking_indices`."""
    if not _checking.get():
        return

    def look(values):
        values = np.asarray(values)
        if values.size and (values.min() < 0 or values.max() >= rows):
            raise ValueError(
                f"{op}: indices from {values.min()} to {values.max()}; accepted: 0 to {rows - 1}, the rows of x"
            )
        in_order = np.sort(values, axis=-1)
        twice = in_order[..., 1:][np.diff(in_order, axis=-1) == 0]
        if twice.size:
            raise ValueError(f"{op}: indices hold {twice[0]} twice; accepted: each row once")

    if isinstance(indices, jax.core.Tracer):
        jax.debug.callback(look, indices)
    else:
        look(indices)
