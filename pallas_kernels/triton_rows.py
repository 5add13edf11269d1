"""Run a `RowKernel` on a GPU by a raw Triton kernel through jax_triton (extra `triton`).

Blocks, programs and the order of sums are those of `pallas_triton_rows`; only the arithmetic is written
again, in Triton's own language, so that nothing is lost when JAX drops Pallas-Triton.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import pallas_triton_rows, raw_triton
from pallas_kernels.blocks import RowKernel

PLATFORMS = raw_triton.PLATFORMS


def implementation(block: ModuleType) -> tuple[Callable, Callable, Callable, Callable]:
    """`forward, backward, refusal, expected_bytes_moved` of an op, from its `block.py` and the `triton_kernels.py`
    beside it. Those kernels import triton, so they are imported when an op is first traced."""

    def launch(kernel: RowKernel, rows, vectors, *, epsilon: float):
        kernels = importlib.import_module(f"{block.__package__}.triton_kernels")
        jitted = kernels.backward if kernel.sums else kernels.forward
        return rows_call(kernel, jitted, rows, vectors, epsilon=epsilon)

    def refusal(stream: jax.Array, *others: jax.Array, epsilon: float) -> str | None:
        width, dtype = stream.shape[-1], stream.dtype
        return raw_triton.refusal(stream=stream) or pallas_triton_rows.refusal(block.BACKWARD, width, dtype)

    def expected_bytes_moved(n: int, width: int, dtype: object, *, backward: bool = False) -> int:
        kernel = block.BACKWARD if backward else block.FORWARD
        return pallas_triton_rows.expected_bytes_moved(kernel, n, width, dtype)

    forward, backward = (functools.partial(f, launch) for f in (block.forward, block.backward))
    return forward, backward, refusal, expected_bytes_moved


def constants(kernel: RowKernel, n: int, width: int) -> dict[str, int]:
    """The shape of a launch, as every kernel takes it: N, D, ROWS and COLUMNS of a block, BLOCKS, PROGRAMS."""
    rows, columns = pallas_triton_rows.block_shape(n, width)
    programs = pallas_triton_rows.programs(kernel, n, width)
    return dict(N=n, D=width, ROWS=rows, COLUMNS=columns, BLOCKS=pl.cdiv(n, rows), PROGRAMS=programs)


def rows_call(
    kernel: RowKernel, jitted: Callable, rows: Sequence[jax.Array], vectors: Sequence[jax.Array], *, epsilon: float
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """`kernel` over all rows, by `jitted(*rows, *vectors, *outputs, *partial sums, **constants, EPSILON)`."""
    (n, width), dtype = rows[0].shape, rows[0].dtype
    shape = constants(kernel, n, width)
    like = [jax.ShapeDtypeStruct((n, width), dtype)] * kernel.outputs
    like += [jax.ShapeDtypeStruct((shape["PROGRAMS"], width), jnp.float32)] * kernel.sums
    inputs = *rows, *(v.astype(jnp.float32) for v in vectors)
    launch = dict(grid=shape["PROGRAMS"], warps=pallas_triton_rows.warps(n, width))
    results = raw_triton.call(jitted, inputs, like, kernel.name, EPSILON=epsilon, **launch, **shape)
    outputs, partials = results[: kernel.outputs], results[kernel.outputs :]
    return tuple(outputs), tuple(jnp.sum(p, axis=0) for p in partials)
