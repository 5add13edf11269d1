"""`take_rows` on GPU by a raw Triton kernel; see `copy_raw_triton`. Its gradient is a put into zeros."""

from __future__ import annotations

from pallas_kernels import raw_triton
from pallas_kernels.rows import copy_raw_triton
from pallas_kernels.rows.take import copied

PLATFORMS = raw_triton.PLATFORMS

forward, backward = copied.by(copy_raw_triton)


def refusal(x, indices, *, rows: int) -> str | None:
    return raw_triton.refusal(x=x)
