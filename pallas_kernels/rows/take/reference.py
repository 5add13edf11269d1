"""`take_rows` by indexing."""

from __future__ import annotations

import jax.numpy as jnp


def forward(x, indices, *, rows: int):
    return (jnp.take_along_axis(x, indices[..., None], axis=1),)
