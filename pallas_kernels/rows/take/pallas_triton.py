"""`take_rows` on GPU through Pallas-Triton; see `copy_triton`. Its gradient is a put into zeros."""

from __future__ import annotations

from pallas_kernels import triton_tile
from pallas_kernels.rows import copy_triton
from pallas_kernels.rows.take import copied

PLATFORMS = triton_tile.PLATFORMS

forward, backward = copied.by(copy_triton)


def refusal(x, indices, *, rows: int) -> str | None:
    return triton_tile.refusal(x=x)
