"""A row kernel's arithmetic, written once: what each Pallas backend's launcher feeds, block by block."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp


@dataclasses.dataclass(frozen=True)
class RowKernel:
    """One pass over rows.

    Args:
      name: of the kernel in compiled programs and profiles.
      body: `body(rows, vectors, width=, dtype=, **constants) -> (outputs, summands)` on one block, all
      float32:
        `rows` is a sequence of `[R, W]`, `vectors` of `[1, W]`, `width` the true number of columns and
        `dtype` that of the rows in memory. Columns beyond `width` hold zeros on entry and are not stored.
        `summands` are `[R, W]`; their sums over all rows come back as `[D]`. A row of zeros must add nothing
        to them.
      rows, vectors: how many `[N, D]` and float32 `[D]` arrays the kernel reads.
      outputs: how many `[N, D]` arrays it writes.
      sums: how many `[D]` sums.
      transcendentals: exponentials per element.
    """

    name: str
    body: Callable[..., tuple[Sequence[jax.Array], Sequence[jax.Array]]]
    rows: int
    vectors: int
    outputs: int
    sums: int = 0
    transcendentals: int = 0

    @property
    def tensors(self) -> int:
        """`[N, D]` arrays read or written."""
        return self.rows + self.outputs

    def bytes_moved(self, n: int, width: int, dtype: object, partial_rows: int) -> int:
        """Bytes of one pass: every tensor and vector once, and `partial_rows` float32 rows of every sum."""
        tensors = self.tensors * n * width * jnp.dtype(dtype).itemsize
        return tensors + (self.vectors + self.sums * partial_rows) * width * 4
