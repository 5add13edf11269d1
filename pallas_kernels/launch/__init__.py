"""Launchers of row kernels, one file per backend: tiles, grids, reductions and indices, but no op's arithmetic.

    xla.py         no kernel: all rows at once, for CPUs
    tpu.py         Pallas on Mosaic: blocks of whole rows through VMEM
    tpu_copy.py    rows moved by index, by DMA
    gpu.py         Pallas on Triton: a few whole rows per program
    mosaic_gpu.py  Pallas on Mosaic GPU: persistent programs, with bulk copies ahead of the arithmetic
    raw_triton.py  the same launches of raw Triton kernels, through jax_triton

A kernel's arithmetic is written once, as the `body` of a `RowKernel` in its op's file. Every launcher of whole rows has

    rows_call(kernel, rows, scalars, vectors, like=None, **constants) -> (outputs, scalars, sums)
    refusal(kernel, *rows) -> str | None          why rows of these widths and dtypes are not supported
    bytes_moved(kernel, n, width, dtype) -> int   bytes that a pass must read and write; None where XLA decides
    unavailable(platform) -> str | None           why its kernels cannot run here at all
"""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

Arrays = Sequence[jax.Array]
Results = tuple[tuple[jax.Array, ...], tuple[jax.Array, ...], tuple[jax.Array, ...]]


def flat(x: Float[Array, "G N D"]) -> Float[Array, "G*N D"]:
    return x.reshape(-1, x.shape[-1])


def flat_indices(indices: Int[Array, "G k"], rows: int) -> Int[Array, " G*k"]:
    """Indices into `[G N, D]`, from indices into each group of N = `rows` rows."""
    if indices.shape[0] == 1:
        return indices[0]
    offsets = rows * jnp.arange(indices.shape[0], dtype=indices.dtype)
    return (indices + offsets[:, None]).reshape(-1)


def rounded(x: jax.Array, dtype: Any) -> jax.Array:
    """x as it would be read back from memory of this dtype; for use outside of kernels. XLA drops a conversion and its
    reverse on GPUs (openxla/xla#41605), so the mantissa is rounded by an operation that it keeps."""
    if jnp.finfo(dtype).bits >= jnp.finfo(x.dtype).bits:
        return x
    short = jax.lax.reduce_precision(x, jnp.finfo(x.dtype).nexp, jnp.finfo(dtype).nmant)
    return short.astype(dtype).astype(x.dtype)


class Block(NamedTuple):
    """What a body knows about its block of rows: the true D, the dtype in memory, and, if the block has more columns
    than D, the mask `[1, W]` of real ones. `everything`: the block is all rows, compiled by XLA. `reduce`: the sum of a
    row, if it is not a sum along the last axis."""

    width: int
    dtype: Any
    inside: jax.Array | None = None
    everything: bool = False
    reduce: Callable[[jax.Array], jax.Array] | None = None

    def sum(self, x: jax.Array) -> jax.Array:
        """The sum of every row, `[R, 1]`."""
        return self.reduce(x) if self.reduce else jnp.sum(x, axis=-1, keepdims=True)

    def mean(self, x: jax.Array) -> jax.Array:
        return jnp.mean(x, axis=-1, keepdims=True) if self.everything else self.sum(x) * (1 / self.width)

    def dot(self, x: jax.Array, vector: jax.Array) -> jax.Array:
        """The dot product of every row with a `[1, W]` vector. XLA:CPU computes it as a matrix-vector product, because
        it vectorises sums of products only if no per-row or per-column factor is broadcast inside."""
        return jnp.dot(x, vector[0], precision="highest")[:, None] if self.everything else self.sum(x * vector)

    def stored(self, x: jax.Array) -> jax.Array:
        """x as it would be read back from memory: rounded to the dtype in memory."""
        return rounded(x, self.dtype) if self.everything else x.astype(self.dtype).astype(x.dtype)


class Launch(NamedTuple):
    """The programs that a kernel starts on a GPU. Each has `threads` threads, `shared` bytes of shared memory, and at
    most `ahead` bytes of rows in flight."""

    programs: int
    threads: int
    shared: int
    ahead: int


def parted(values: Iterable[Any], *counts: int) -> list[list[Any]]:
    """The first `counts[0]` values, the next `counts[1]`, ..., and all the remaining ones."""
    values = iter(values)
    return [list(itertools.islice(values, count)) for count in counts] + [list(values)]


def varying_as(operand: jax.Array, types: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """The types of a kernel's results. Inside a `shard_map` they vary over the same mesh axes as its operands do."""
    axes = jax.typeof(operand).manual_axis_type
    return [jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=axes) for x in types]


def _nothing_but(scalars, computed):
    return computed


@dataclasses.dataclass(frozen=True)
class RowKernel:
    """One pass over rows, as its arithmetic on one block of them.

    Args:
      op, verb: the kernel's name in compiled programs and profiles is `op_verb`.
      body: `body(block, rows, scalars, vectors, **constants) -> (outputs, computed, summands)`, all float32: rows,
        outputs and summands `[R, W]`, scalars and what is computed `[R, 1]`, vectors `[1, W]`. Columns beyond the
        width hold zeros on entry and are not stored. Sums of summands over all rows come back as `[D]`; a row of
        zeros must add nothing to them.
      rows, outputs: how many `[N, D]` arrays it reads and writes.
      vectors, sums: how many float32 `[D]` arrays.
      scalars, scalar_outputs: how many float32 `[N]` arrays.
      reads: positions of the scalars that the body needs; `computes` is the number that it returns.
      lane: `lane(scalars, computed) -> scalar outputs`, elementwise: on a TPU, and by Mosaic GPU, XLA computes it
        outside the kernel.
      transcendentals: exponentials per element.
      per_thread, most_warps: on a GPU, elements of a block per thread, and the maximum number of warps per program.
    """

    op: str
    verb: str
    body: Callable[..., tuple[Arrays, Arrays, Arrays]]
    rows: int
    outputs: int
    vectors: int = 0
    sums: int = 0
    scalars: int = 0
    scalar_outputs: int = 0
    reads: tuple[int, ...] = ()
    computes: int = 0
    lane: Callable[[Arrays, Arrays], Arrays] = _nothing_but
    transcendentals: int = 0
    per_thread: int = 8
    most_warps: int = 32

    @property
    def name(self) -> str:
        return f"{self.op}_{self.verb}"

    @property
    def tensors(self) -> int:
        """The number of `[N, D]` arrays that are read or written."""
        return self.rows + self.outputs

    def bytes_moved(self, n: int, width: int, dtype: object, partial_rows: int) -> int:
        """Bytes of one pass: every array once, and `partial_rows` float32 rows of every sum."""
        per_row = self.tensors * width * jnp.dtype(dtype).itemsize + (self.scalars + self.scalar_outputs) * 4
        return n * per_row + (self.vectors + self.sums * partial_rows) * width * 4

    def cost(self, n: int, width: int, moved: int) -> pl.CostEstimate:
        """The cost estimate, for XLA's scheduler, of a pass that moves this many bytes."""
        elements = n * width
        return pl.CostEstimate(8 * self.tensors * elements, self.transcendentals * elements, moved)


_interpreter: ContextVar[Any] = ContextVar("pallas_interpreter", default=None)


@contextlib.contextmanager
def interpreting(params: Any = True) -> Iterator[None]:
    """Pallas kernels traced inside run in an interpreter, on any platform. `params`: True or `InterpretParams`."""
    token = _interpreter.set(params)
    try:
        yield
    finally:
        _interpreter.reset(token)


def interpreter() -> Any:
    """The value that a kernel passes as `interpret=` to `pl.pallas_call`."""
    return _interpreter.get() or False


# With more columns than this, a row gets more warps than a program on an AMD GPU may have: see `gpu.capped`.
WIDE_ON_AMD = 4096

_platform: ContextVar[str | None] = ContextVar("platform_of_the_branch", default=None)


@contextlib.contextmanager
def tracing_for(platform: str) -> Iterator[None]:
    """Declares that everything traced inside will be lowered for this platform only."""
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def traced_platform() -> str | None:
    """The platform of `tracing_for`; None outside of it."""
    return _platform.get()
