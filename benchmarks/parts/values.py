"""Part `values`: every kernel that runs here, forward and gradients, against the reference in float64."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.parts.rows import Case, Options
from pallas_kernels import shapes
from pallas_kernels.bench import arrays, runs_here, with_gradients
from pallas_kernels.dispatch import Op, run
from pallas_kernels.ops import all_ops
from pallas_kernels.shapes import sample

WIDTHS = (640, 1024, 2048, 4096, 8192)


def cases(options: Options) -> Iterator[Case]:
    """The widths that models have come first, then the odd ones."""
    if options.rehearsal:
        wanted = [(8, 64, "float32")]
    else:
        wanted = [(1000, width, dtype) for width in WIDTHS for dtype in ("bfloat16", "float32")] + [*shapes.COVER]
    for rows, width, dtype in wanted:
        for name, op in all_ops().items():
            of = sample(name, rows, width, dtype)
            for implementation in op.implementations:
                if runs_here(op, implementation, of):
                    case = {"op": name, "implementation": implementation, "rows": rows, "width": width, "dtype": dtype}
                    yield Case(case, functools.partial(measure, op, implementation, rows, width, dtype))


def measure(op: Op, implementation: str, rows: int, width: int, dtype: str) -> dict:
    """`worst`: the greatest error of any result in units of what is allowed for it; `errors`: of each result.

    Raises FloatingPointError for a result that is not finite.
    """
    of = sample(op.name, rows, width, dtype)
    args = arrays(jax.random.key(0), of.args)
    forward = functools.partial(run, op, implementation, **of.constants)
    cotangents = arrays(jax.random.key(1), jax.eval_shape(forward, *args))
    found = jax.device_get(jax.jit(functools.partial(with_gradients, forward))(args, cotangents))
    exact = _exact(op, of.constants, jax.device_get(args), jax.device_get(cotangents))
    errors = [_error(value, truth, rows, width, dtype) for value, truth in zip(found, exact, strict=True)]
    return {"worst": max(errors), "errors": errors}


def _exact(op: Op, constants: dict, args, cotangents) -> list[np.ndarray]:
    """The reference in float64 on the CPU, on the same rounded inputs."""
    wide = lambda x: x if np.issubdtype(x.dtype, np.integer) else np.asarray(x, np.float64)  # noqa: E731
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        forward = functools.partial(run, op, "reference", **constants)
        args, cotangents = jax.tree.map(wide, (args, cotangents))
        return jax.device_get(jax.jit(functools.partial(with_gradients, forward))(args, cotangents))


def _error(value: np.ndarray, truth: np.ndarray, rows: int, width: int, dtype: str) -> float:
    """In units of the tolerance, after division by the row's largest true value or, for what is summed over rows, by
    the root of the number of terms. Two roundings to the dtype are allowed: of what is stored, and of what is made of
    it."""
    value = np.asarray(value, np.float64)
    if not np.isfinite(value).all():
        raise FloatingPointError("a result is not finite")
    of_rows = truth.size >= rows and truth.ndim >= 1
    limits = shapes.tolerance(dtype if of_rows else jnp.float32, width if of_rows else max(rows, width))
    if of_rows:
        unit = np.abs(truth).max(axis=-1, keepdims=True) + 1e-30 if truth.ndim > 1 else np.abs(truth).max() + 1e-30
    else:
        unit = math.sqrt(rows * width / max(truth.size, 1))
        limits["atol"] += 4 * float(jnp.finfo(dtype).eps)
    allowed = 2 * limits["rtol"] * np.abs(truth) / unit + limits["atol"]
    return float(np.max(np.abs(value - truth) / unit / allowed))
