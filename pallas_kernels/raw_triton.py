"""Launch raw Triton kernels through jax_triton (extra `triton`), over 0.3.1 and 0.4's names for the same
arguments."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Sequence

import jax
from jax.experimental import pallas as pl

from pallas_kernels import triton_tile
from pallas_kernels.triton_tile import launch_shape

PLATFORMS = ("cuda",)

# Triton writes the newest PTX it knows; the assembler of an older CUDA toolkit refuses it. Version 8.7 (CUDA
# 12.8) covers every architecture up to Blackwell.
PTX_VERSION = 87


def refusal(**rows: jax.Array) -> str | None:
    """Why jax_triton cannot be used here, or not for these rows."""
    return missing() or triton_tile.refusal(**rows)


def missing() -> str | None:
    """Why jax_triton cannot be used here, whatever the rows."""
    if importlib.util.find_spec("jax_triton") is None:
        return "needs jax_triton: pip install -e '.[triton]'"
    version = importlib.metadata.version("jax-triton")
    if jax.__version_info__ >= (0, 12) and tuple(map(int, version.split(".")[:3])) <= (0, 4, 1):
        return f"jax_triton {version} does not run on jax {jax.__version__}"
    return None


def launch(
    kernel: Callable, inputs: Sequence[jax.Array], like: Sequence[jax.Array], name: str, **constants: float
) -> list[jax.Array]:
    """`kernel` over all rows of `inputs[0]` `[N, D]`, whole ones; results are shaped and typed as `like`.

    The kernel takes input pointers, output pointers, then the constants N, D, ROWS, COLUMNS and `constants`.
    """
    shape, options = row_blocks(*inputs[0].shape)
    return call(kernel, inputs, like, name, **options, **shape, **constants)


def row_blocks(n: int, width: int) -> tuple[dict[str, int], dict]:
    """The constants N, D, ROWS and COLUMNS of a kernel over whole rows; the grid and warps for `call`."""
    rows, columns, warps = launch_shape(n, width)
    return dict(N=n, D=width, ROWS=rows, COLUMNS=columns), dict(grid=pl.cdiv(n, rows), warps=warps)


def call(
    kernel: Callable,
    inputs: Sequence[jax.Array],
    like: Sequence[jax.Array],
    name: str,
    *,
    grid: int,
    warps: int,
    **constants: float,
) -> list[jax.Array]:
    """`grid` programs of `kernel(*input pointers, *output pointers, constants)`."""
    import jax_triton

    return jax_triton.triton_call(
        *inputs, kernel=kernel, grid=(grid,), name=name, num_warps=warps, num_stages=1, **_typed(like), **constants
    )


def call_in_place(
    kernel: Callable,
    aliased: Callable,
    into: jax.Array,
    inputs: Sequence[jax.Array],
    name: str,
    *,
    grid: int,
    warps: int,
    **constants: float,
) -> jax.Array:
    """`kernel(pointer to into, *input pointers, constants)`; gives `into` as the kernel left it.

    The memory is that of `into` unless something else still reads it. jax_triton 0.3 hands a kernel one more
    pointer to it, after the inputs: `aliased` is the same kernel taking that too.
    """
    import jax_triton

    options = dict(grid=(grid,), name=name, num_warps=warps, num_stages=1, **constants)
    if _old():
        outs = [jax.ShapeDtypeStruct(into.shape, into.dtype)]
        return jax_triton.triton_call(
            into, *inputs, kernel=aliased, input_output_aliases={0: 0}, out_shape=outs, **options
        )[0]
    memory = jax.new_ref(into)
    jax_triton.triton_call(memory, *inputs, kernel=kernel, **_typed(()), **options)
    return jax.freeze(memory)


def _typed(like: Sequence[jax.Array]) -> dict:
    outs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like)
    return dict(out_shape=outs) if _old() else dict(out_type=outs, backend_options={"ptx_version": PTX_VERSION})


def _old() -> bool:
    return importlib.metadata.version("jax-triton").startswith("0.3")
