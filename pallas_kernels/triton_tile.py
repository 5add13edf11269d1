"""A few whole rows per program: what the Pallas-Triton kernels with per-row scalars or indices are launched
with.

Triton's arrays are powers of two, so a program covers the next power of two of columns and masks the rest;
narrow rows share a program.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels.dispatch import interpreter

PLATFORMS = ("cuda", "rocm")

MAX_WIDTH = 16384  # beyond it a row no longer fits into the registers of one program


def refusal(**rows: jax.Array) -> str | None:
    """Why `[..., D]` rows of this width or dtype cannot be taken."""
    for name, x in rows.items():
        if jnp.dtype(x.dtype).itemsize not in (2, 4):
            return f"{name} is {x.dtype.name}; accepted: float32, bfloat16, float16"
        if x.shape[-1] > MAX_WIDTH:
            return f"D = {x.shape[-1]}; accepted: up to {MAX_WIDTH}, a row has to fit into one program"
    return None


class Tile(NamedTuple):
    """Rows and columns of one program; `load` and `store` take `[N, D]` or `[N]` references."""

    row: jax.Array
    valid: jax.Array
    column: jax.Array
    width: int

    @property
    def inside(self) -> jax.Array:
        """`[1, W]`: the columns that exist."""
        return (self.column < self.width)[None]

    def at(self, indices_ref) -> Tile:
        """The same rows of the program, at the places that `indices_ref` holds for them.

        A row the program has too many goes nowhere: the interpreter, unlike Triton, writes masked elements back.
        """
        nowhere = jnp.iinfo(jnp.int32).max
        return self._replace(row=plgpu.load(indices_ref.at[self.row], mask=self.valid, other=nowhere))

    def load(self, ref, dtype=jnp.float32) -> jax.Array:
        place, mask = self._address(ref)
        return plgpu.load(ref.at[place], mask=mask, other=0.0).astype(dtype)

    def store(self, ref, value: jax.Array) -> None:
        place, mask = self._address(ref)
        plgpu.store(ref.at[place], value.astype(ref.dtype), mask=mask)

    def _address(self, ref):
        if len(ref.shape) == 1:
            return self.row, self.valid
        return (self.row[:, None], self.column[None]), self.valid[:, None] & self.inside


def launch_shape(n: int, width: int) -> tuple[int, int, int]:
    """Rows and columns of a program, both powers of two, and its warps."""
    columns = pl.next_power_of_2(width)
    rows = min(max(1, 2048 // columns), pl.next_power_of_2(n))
    return rows, columns, min(max(rows * columns // 512, 1), 16)


def launch(
    kernel: Callable,
    n: int,
    width: int,
    inputs: Sequence[jax.Array],
    like: Sequence[jax.Array],
    cost: pl.CostEstimate,
    name: str,
    aliases: Mapping[int, int] | None = None,
) -> list[jax.Array]:
    """`kernel(tile, *input_refs, *output_refs)` over `n` rows; results are shaped and typed as `like`.

    `aliases` maps inputs to the outputs that take over their memory: rows nobody stores keep their value.
    """
    rows, columns, warps = launch_shape(n, width)

    def program(*refs):
        row = pl.program_id(0) * rows + jnp.arange(rows)
        kernel(Tile(row, row < n, jnp.arange(columns), width), *refs)

    return pl.pallas_call(
        program,
        grid=(pl.cdiv(n, rows),),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like],
        input_output_aliases=dict(aliases or {}),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=1),
        cost_estimate=cost,
        interpret=interpreter(),
        name=name,
    )(*inputs)
