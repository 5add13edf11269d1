"""Grouped matmuls on NVIDIA GPUs by tokamax's Triton kernels, where the package is installed.

Why this exists: on these GPUs XLA (jax 0.11) multiplies every row with the matrices of all groups and masks the
results, E times the work; docs/memory.md has the compiled figures. On AMD GPUs XLA calls a library with grouped
matmuls.

Numerics: float32 sums. The kernels leave rows after the last group undefined, in value and gradient;
`nagjax.layers.ragged` sets them to zero.
"""

import dataclasses
import functools

import jax
from jaxtyping import Array, Float, Int

from nagjax.layers.platform import installed, on_gpu, warn_once
from pallas_kernels.dispatch import here
from pallas_kernels.launch import raw_triton
from pallas_kernels.launch.gpu import wrong_capability

TILE, DEEP = 128, 32  # rows and columns of a tile, and features per step: tokamax's own choice
SCOPE = "grouped_matmul"  # the name by which `nagjax plan` finds the kernels


def usable() -> bool:
    """Whether the program is for a GPU that these kernels support and the packages are installed. Warns once if only
    these are missing."""
    if not on_gpu() or here() == "rocm" or wrong_capability() is not None:
        return False
    slow = "dropless experts: XLA multiplies every row with the matrices of all experts on this GPU; "
    if not installed(
        ("tokamax", "jax_triton"), f"{slow}pip install -e '.[tokamax]', or train with --moe.dispatch capacity"
    ):
        return False
    if why := raw_triton.missing():  # tokamax's kernels are jax_triton's
        warn_once(f"{slow}tokamax's kernels are not taken: {why}")
    return why is None


def grouped_matmul(
    rows: Float[Array, "N m"], matrices: Float[Array, "E m n"], sizes: Int[Array, " E"]
) -> Float[Array, "N n"]:
    """As `nagjax.layers.ragged.ragged_matmul`, but rows after the last group are undefined; only where `usable`."""
    matmul = _kernel(max(16, min(TILE, 1 << (rows.shape[0] - 1).bit_length())))
    with jax.named_scope(SCOPE):
        return matmul(rows, matrices, group_sizes=sizes, preferred_element_type=rows.dtype)


@functools.cache
def _kernel(tile: int):
    from tokamax.ops.gpu import PallasTritonRaggedDot, PallasTritonRaggedDotConfig

    config = PallasTritonRaggedDotConfig(block_m=tile, block_n=TILE, block_k=DEEP, num_warps=4, num_stages=4)
    once = PallasTritonRaggedDot(config=config, bypass_device_check=True)  # the check sees this machine's device only
    return dataclasses.replace(once, vjp=functools.partial(once.vjp, dlhs_ragged_dot=once, drhs_ragged_dot=once))
