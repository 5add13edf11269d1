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
    if importlib.util.find_spec("jax_triton") is None:
        return "needs jax_triton: pip install 'nagjax[triton]'"
    version = importlib.metadata.version("jax-triton")
    if jax.__version_info__ >= (0, 12) and tuple(map(int, version.split(".")[:3])) <= (0, 4, 1):
        return f"jax_triton {version} does not run on jax {jax.__version__}"
    return triton_tile.refusal(**rows)


def launch(
    kernel: Callable, inputs: Sequence[jax.Array], like: Sequence[jax.Array], name: str, **constants: float
) -> list[jax.Array]:
    """`kernel` over all rows of `inputs[0]` `[N, D]`; results are shaped and typed as `like`.

    The kernel takes input pointers, output pointers, then the constants N, D, ROWS, COLUMNS and `constants`.
    """
    import jax_triton

    n, width = inputs[0].shape
    rows, columns, warps = launch_shape(n, width)
    outs = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in like)
    if importlib.metadata.version("jax-triton").startswith("0.3"):
        options = dict(out_shape=outs)
    else:
        options = dict(out_type=outs, backend_options={"ptx_version": PTX_VERSION})
    return jax_triton.triton_call(
        *inputs,
        kernel=kernel,
        grid=(pl.cdiv(n, rows),),
        name=name,
        num_warps=warps,
        num_stages=1,
        N=n,
        D=width,
        ROWS=rows,
        COLUMNS=columns,
        **options,
        **constants,
    )
