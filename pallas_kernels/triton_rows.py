"""Run a `RowKernel` on a GPU by a raw Triton kernel through jax_triton (extra `triton`).

Blocks, programs and the order of sums are those of `pallas_triton_rows`; only the arithmetic is written
again, in Triton's own language, so that nothing is lost when JAX drops Pallas-Triton.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels import pallas_triton_rows, raw_triton
from pallas_kernels.blocks import RowKernel

PLATFORMS = raw_triton.PLATFORMS

expected_bytes_moved = pallas_triton_rows.expected_bytes_moved


def refusal(kernel: RowKernel, stream: jax.Array) -> str | None:
    """Why jax_triton cannot be used here, or not for rows of this width and dtype."""
    return raw_triton.refusal(stream=stream) or pallas_triton_rows.refusal(kernel, stream.shape[-1], stream.dtype)


def constants(kernel: RowKernel, n: int, width: int) -> dict[str, int]:
    """The shape of a launch, as every kernel takes it: N, D, ROWS and COLUMNS of a block, BLOCKS, PROGRAMS."""
    rows, columns = pallas_triton_rows.block_shape(n, width)
    programs = pallas_triton_rows.programs(kernel, n, width)
    return dict(N=n, D=width, ROWS=rows, COLUMNS=columns, BLOCKS=pl.cdiv(n, rows), PROGRAMS=programs)


def rows_call(
    kernel: RowKernel, jitted: Callable, rows: Sequence[jax.Array], vectors: Sequence[jax.Array], *, epsilon: float
) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """`kernel` over all rows, by `jitted(*rows, *vectors, *outputs, *partial sums, **constants, EPSILON)`."""
    import jax_triton

    (n, width), dtype = rows[0].shape, rows[0].dtype
    shape = constants(kernel, n, width)
    like = [jax.ShapeDtypeStruct((n, width), dtype)] * kernel.outputs
    like += [jax.ShapeDtypeStruct((shape["PROGRAMS"], width), jnp.float32)] * kernel.sums
    if importlib.metadata.version("jax-triton").startswith("0.3"):
        options = dict(out_shape=like)
    else:
        options = dict(out_type=like, backend_options={"ptx_version": raw_triton.PTX_VERSION})
    results = jax_triton.triton_call(
        *rows,
        *(v.astype(jnp.float32) for v in vectors),
        kernel=jitted,
        grid=(shape["PROGRAMS"],),
        name=kernel.name,
        num_warps=pallas_triton_rows.warps(n, width),
        num_stages=1,
        EPSILON=epsilon,
        **shape,
        **options,
    )
    outputs, partials = results[: kernel.outputs], results[kernel.outputs :]
    return tuple(outputs), tuple(jnp.sum(p, axis=0) for p in partials)
