"""Row kernels on a GPU as raw Triton programs, through jax_triton (extra `triton`), for when JAX drops Pallas-Triton.

Blocks, programs and the order of sums are those of `gpu`; only the arithmetic is written again, in Triton's own
language, in `ops/triton/`. Works with the argument names of both jax_triton 0.3.1 and 0.4.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.launch import Arrays, Results, RowKernel, gpu
from pallas_kernels.launch.gpu import bytes_moved as bytes_moved
from pallas_kernels.launch.gpu import refusal as refusal

PLATFORMS = ("cuda",)

# Triton writes the newest PTX it knows; the assembler of an older CUDA toolkit refuses it. Version 8.7 (CUDA 12.8)
# covers every architecture up to Blackwell.
PTX_VERSION = 87


def unavailable(platform: str) -> str | None:
    """Why no raw Triton kernel can be used here."""
    return missing() or gpu.too_old()


def missing() -> str | None:
    """Why jax_triton cannot be used here."""
    if importlib.util.find_spec("jax_triton") is None:
        return "needs jax_triton: pip install -e '.[triton]'"
    version = importlib.metadata.version("jax-triton")
    if jax.__version_info__ >= (0, 12) and tuple(map(int, version.split(".")[:3])) <= (0, 4, 1):
        return f"jax_triton {version} does not run on jax {jax.__version__}"
    return None


def kernels(op: str) -> ModuleType:
    """The raw Triton kernels of an op. They import triton, so they are imported when an op is first traced."""
    return importlib.import_module(f"pallas_kernels.ops.triton.{op}")


def rows_call(
    kernel: RowKernel, rows: Arrays, scalars: Arrays = (), vectors: Arrays = (), *, like: Arrays = (), **constants
) -> Results:
    """As `gpu.rows_call`, with the function `kernel.verb` of the op's Triton file. It takes pointers to rows, scalars,
    vectors, outputs and partial sums, then N, D, ROWS, COLUMNS (for sums also BLOCKS and PROGRAMS), and constants."""
    n, width = rows[0].shape
    programs = gpu.programs(kernel, n, width)
    shape = rows_and_columns(n, width)
    if kernel.sums:
        shape |= dict(BLOCKS=pl.cdiv(n, shape["ROWS"]), PROGRAMS=programs)
    outs = [jax.ShapeDtypeStruct((n, width), x.dtype) for x in like or rows[:1] * kernel.outputs]
    outs += [jax.ShapeDtypeStruct((n,), jnp.float32)] * kernel.scalar_outputs
    results = call(
        getattr(kernels(kernel.op), kernel.verb),
        (*rows, *scalars, *(v.astype(jnp.float32) for v in vectors)),
        outs + [jax.ShapeDtypeStruct((programs, width), jnp.float32)] * kernel.sums,
        kernel.name,
        grid=programs,
        warps=gpu.warps(n, width, kernel.per_thread, kernel.most_warps),
        **shape,
        **{name.upper(): value for name, value in constants.items()},
    )
    wide, lane, partials = results[: kernel.outputs], results[kernel.outputs : len(outs)], results[len(outs) :]
    return tuple(wide), tuple(lane), tuple(jnp.sum(p, axis=0) for p in partials)


def take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """`x[indices]`."""
    out = jax.ShapeDtypeStruct((indices.shape[0], x.shape[1]), x.dtype)
    return call(kernels("rows").take, (x, indices), (out,), "take_rows", **_copying(out))[0]


def put(x: jax.Array, rows: jax.Array, indices: jax.Array) -> jax.Array:
    """`x` with `rows` at `indices`, in place."""
    copy = kernels("rows")
    return call_in_place(copy.put, copy.put_aliased, x, (rows, indices), "put_rows", **_copying(rows))


def rows_and_columns(n: int, width: int) -> dict[str, int]:
    """The constants N, D, ROWS and COLUMNS of a kernel over whole rows."""
    rows, columns = gpu.block_shape(n, width)
    return dict(N=n, D=width, ROWS=rows, COLUMNS=columns)


def _copying(rows: jax.Array) -> dict:
    shape = rows_and_columns(*rows.shape)
    return dict(grid=pl.cdiv(rows.shape[0], shape["ROWS"]), warps=gpu.warps(*rows.shape), **shape)


def call(
    kernel: Callable, inputs: Arrays, like: Arrays, name: str, *, grid: int, warps: int, **constants
) -> list[jax.Array]:
    """Launches `grid` programs of `kernel(*input pointers, *output pointers, constants)`."""
    import jax_triton

    return jax_triton.triton_call(
        *inputs, kernel=kernel, grid=(grid,), name=name, num_warps=warps, num_stages=1, **_typed(like), **constants
    )


def call_in_place(
    kernel: Callable, aliased: Callable, into: jax.Array, inputs: Arrays, name: str, *, grid: int, warps: int, **more
) -> jax.Array:
    """Runs `kernel(pointer to into, *input pointers, constants)`, which changes `into`, and returns `into`.

    It works in place unless something else still reads `into`. jax_triton 0.3 passes one more pointer to it, after the
    inputs: `aliased` is the same kernel with that parameter.
    """
    import jax_triton

    options = dict(grid=(grid,), name=name, num_warps=warps, num_stages=1, **more)
    if _old():
        outs = [jax.ShapeDtypeStruct(into.shape, into.dtype)]
        return jax_triton.triton_call(
            into, *inputs, kernel=aliased, input_output_aliases={0: 0}, out_shape=outs, **options
        )[0]
    memory = jax.new_ref(into)
    jax_triton.triton_call(memory, *inputs, kernel=kernel, **_typed(()), **options)
    return jax.freeze(memory)


def _typed(like: Arrays) -> dict:
    outs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like)
    return dict(out_shape=outs) if _old() else dict(out_type=outs, backend_options={"ptx_version": PTX_VERSION})


def _old() -> bool:
    return importlib.metadata.version("jax-triton").startswith("0.3")
