"""The ops, one file each: public function, equation, reference, and the arithmetic on a block of rows.

An op's file ends with its `Op`, which names every implementation; `triton/` has the same arithmetic in Triton's
language. The package's README lists the files of a new op.
"""

import functools
import importlib
import pkgutil
from collections.abc import Callable

from pallas_kernels.dispatch import Implementation, Op
from pallas_kernels.launch import RowKernel, gpu, mosaic_gpu, raw_triton, tpu, xla

# The launcher of each implementation, for ops whose kernels take whole rows.
LAUNCHERS = {"mosaic_tpu": tpu, "pallas_triton": gpu, "mosaic_gpu": mosaic_gpu, "triton": raw_triton, "xla": xla}


def by_rows(forward: Callable, backward: Callable, *kernels: RowKernel) -> dict[str, Implementation]:
    """One implementation for each launcher.

    `forward(rows_call, *inputs)` and `backward(rows_call, residuals, cotangents)` use a launcher's `rows_call`;
    `kernels` are the forward and the backward kernel. Only the backward kernel, which needs more memory on chip, is
    asked for its `refusal`.
    """

    def on(launcher) -> Implementation:
        def refusal(*inputs, **constants):
            return launcher.refusal(kernels[1], *(x for x in inputs if len(x.shape) == 2))

        def bytes_moved(rows, width, dtype, *, backward=False):
            return launcher.bytes_moved(kernels[backward], rows, width, dtype)

        return Implementation(
            functools.partial(forward, launcher.rows_call),
            functools.partial(backward, launcher.rows_call),
            launcher.PLATFORMS,
            refusal,
            launcher.unavailable,
            bytes_moved if launcher.bytes_moved else None,
        )

    return {name: on(launcher) for name, launcher in LAUNCHERS.items()}


def all_ops() -> dict[str, Op]:
    """Every op of the package by name."""
    modules = (importlib.import_module(f"{__name__}.{m.name}") for m in pkgutil.iter_modules(__path__) if not m.ispkg)
    return {x.name: x for module in modules for x in vars(module).values() if isinstance(x, Op)}
