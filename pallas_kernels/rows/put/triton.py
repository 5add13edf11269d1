"""`put_rows` on GPU by a raw Triton kernel, in place; see `copy_raw_triton`."""

from __future__ import annotations

from pallas_kernels import raw_triton
from pallas_kernels.rows import copy_raw_triton
from pallas_kernels.rows.put import copied

PLATFORMS = raw_triton.PLATFORMS

forward, backward = copied.by(copy_raw_triton)


def refusal(x, rows, indices) -> str | None:
    return raw_triton.refusal(x=x)
