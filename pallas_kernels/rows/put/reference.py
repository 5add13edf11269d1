"""`put_rows` by indexed assignment."""

from __future__ import annotations

import jax


def forward(x, rows, indices):
    return (jax.vmap(lambda a, b, i: a.at[i].set(b))(x, rows, indices),)
