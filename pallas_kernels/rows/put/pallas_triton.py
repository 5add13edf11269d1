"""`put_rows` on GPU through Pallas-Triton, in place; see `copy_triton`."""

from __future__ import annotations

from pallas_kernels import triton_tile
from pallas_kernels.rows import copy_triton
from pallas_kernels.rows.put import copied

PLATFORMS = triton_tile.PLATFORMS

forward, backward = copied.by(copy_triton)


def refusal(x, rows, indices) -> str | None:
    return triton_tile.refusal(x=x)
