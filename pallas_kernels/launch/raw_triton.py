"""Row kernels on a GPU as raw Triton programs, through jax_triton (extra `triton`), for when JAX drops Pallas-Triton.

Blocks, programs and the order of sums are those of `gpu`; only the arithmetic is written again, in Triton's own
language, in `ops/triton/`.
"""

import importlib
import importlib.metadata
import importlib.util
import re
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.launch import Arrays, Results, RowKernel, gpu, parted, varying_as
from pallas_kernels.launch.gpu import bytes_moved as bytes_moved
from pallas_kernels.launch.gpu import refusal as refusal

PLATFORMS = ("cuda",)

# Triton writes the newest PTX it knows; the assembler of an older CUDA toolkit refuses it. Version 8.7 (CUDA 12.8)
# covers every architecture up to Blackwell.
PTX_VERSION = 87


def unavailable(platform: str) -> str | None:
    """Why no raw Triton kernel can be used here; None if one can."""
    return missing() or gpu.wrong_capability()


def missing() -> str | None:
    """Why jax_triton cannot be used here; None if it can."""
    if importlib.util.find_spec("jax_triton") is None:
        return "needs jax_triton: pip install -e '.[triton]'"
    version = importlib.metadata.version("jax-triton")
    if tuple(map(int, version.split(".")[:2])) < (0, 4):
        return f"jax_triton {version} is too old; accepted: 0.4 and newer"
    if (triton := _triton()) < (3, 7):  # jax_triton can be imported with it, and then compiles nothing
        return f"jax_triton {version} needs triton 3.7 or newer; this is {'.'.join(map(str, triton)) or 'none'}"
    if jax.__version_info__ >= (0, 12) and tuple(map(int, version.split(".")[:3])) <= (0, 4, 1):
        return f"jax_triton {version} does not run on jax {jax.__version__}"
    return None


def _triton() -> tuple[int, ...]:
    """Triton's version, empty if it is not installed."""
    try:
        return tuple(map(int, re.findall(r"\d+", importlib.metadata.version("triton"))[:2]))  # of 3.7rc1: 3, 7
    except importlib.metadata.PackageNotFoundError:
        return ()


def kernels(op: str) -> ModuleType:
    """The raw Triton kernels of an op. They import triton, so they are imported when an op is first traced."""
    return importlib.import_module(f"pallas_kernels.ops.triton.{op}")


def rows_call(
    kernel: RowKernel, rows: Arrays, scalars: Arrays = (), vectors: Arrays = (), *, like: Arrays = (), **constants
) -> Results:
    """`gpu.rows_call` without indices, with the function `kernel.verb` of the op's Triton file. This function takes
    pointers to rows, scalars, vectors, outputs and partial sums, then N, D, ROWS, COLUMNS (for sums also BLOCKS and
    PROGRAMS), and constants."""
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
    wide, lane, partials = parted(results, kernel.outputs, kernel.scalar_outputs)
    return tuple(wide), tuple(lane), tuple(jnp.sum(p, axis=0) for p in partials)


def take(x: jax.Array, indices: jax.Array) -> jax.Array:
    """`x[indices]`."""
    out = jax.ShapeDtypeStruct((indices.shape[0], x.shape[1]), x.dtype)
    return call(kernels("rows").take, (x, indices), (out,), "take_rows", **_copying(out))[0]


def put(x: jax.Array, rows: jax.Array, indices: jax.Array) -> jax.Array:
    """`x` with `rows` at `indices`, in place unless something else still reads `x`."""
    memory = jax.new_ref(x)
    call(kernels("rows").put, (memory, rows, indices), (), "put_rows", **_copying(rows))
    return jax.freeze(memory)


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

    outs = tuple(varying_as(inputs[0], like))
    options = dict(num_warps=warps, num_stages=1, backend_options={"ptx_version": PTX_VERSION})
    return jax_triton.triton_call(
        *inputs, kernel=kernel, grid=(grid,), name=name, out_type=outs, **options, **constants
    )
