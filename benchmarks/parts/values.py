"""Part `values`: checks every kernel that runs here, forward and gradients, against the reference in float64
(`oracle`)."""

import functools
import math
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.parts.oracle import Oracle, oracle
from benchmarks.parts.rows import AHEAD, Case, Options
from pallas_kernels import shapes
from pallas_kernels.bench import arrays, runs_here, with_gradients
from pallas_kernels.dispatch import REFERENCE, Op, run
from pallas_kernels.ops import all_ops
from pallas_kernels.shapes import sample

FIRST = ((1000, 1024, "bfloat16"), (7, 640, "bfloat16"), (1000, 1024, "float32"))
WIDTHS = (1024, 640, 2048, 4096, 8192)
LAST = "mosaic_gpu"  # the newest compiler, whose kernels may hang; never chosen if there is another
ROUNDINGS = 2.0  # allowed errors by intermediate roundings, in units of their root mean square


def cases(options: Options) -> Iterator[Case]:
    """First a usual width, an odd one and float32, then all other shapes one by one; at each of them LAST comes
    last."""
    wanted = [(1000, width, dtype) for dtype in ("bfloat16", "float32") for width in WIDTHS] + [*shapes.COVER]
    others = [(shape,) for shape in dict.fromkeys(wanted) if shape not in FIRST]
    for together in [((8, 64, "float32"),)] if options.rehearsal else [FIRST, *others]:
        yield from sorted(_of_shapes(together), key=lambda case: case.name["implementation"] == LAST)


def _of_shapes(wanted: Sequence[tuple[int, int, str]]) -> Iterator[Case]:
    for rows, width, dtype in wanted:
        for name, op in all_ops().items():
            of = sample(name, rows, width, dtype)
            for implementation in op.implementations:
                if runs_here(op, implementation, of):
                    case = {"op": name, "implementation": implementation, "rows": rows, "width": width, "dtype": dtype}
                    made = functools.partial(prepared, op, implementation, rows, width, dtype)
                    yield Case(case, functools.partial(measure, op, rows, width, dtype), compile=made)


class Known(NamedTuple):
    """Arguments, cotangents, and the expected results."""

    args: tuple
    cotangents: tuple
    exact: Oracle


def prepared(op: Op, implementation: str, rows: int, width: int, dtype: str) -> tuple[jax.stages.Compiled, Known]:
    """The parts that take the host's time: the compiled program of outputs and gradients, and its expected results."""
    return compiled(op, implementation, rows, width, dtype), known(op, rows, width, dtype)


def compiled(op: Op, implementation: str, rows: int, width: int, dtype: str) -> jax.stages.Compiled:
    """The compiled program that computes outputs and gradients from arguments and cotangents."""
    of = sample(op.name, rows, width, dtype)
    forward = functools.partial(run, op, implementation, **of.constants)
    program = jax.jit(functools.partial(with_gradients, forward))
    return program.lower(of.args, jax.eval_shape(forward, *of.args)).compile()


def measure(op: Op, rows: int, width: int, dtype: str, made: tuple[Callable, Known]) -> dict:
    """`worst`: the greatest error of any result, in units of its tolerance; `errors`: that of each result.

    Raises FloatingPointError for a result that is not finite.
    """
    program, of = made
    errors = judged(op, jax.device_get(program(of.args, of.cotangents)), of.exact, rows, width, dtype)
    return {"worst": max(errors), "errors": errors}


def known(op: Op, rows: int, width: int, dtype: str) -> Known:
    """The expected results, computed only once even if several threads ask at the same time."""
    with _turns[op.name, rows, width, dtype]:
        return _known(op, rows, width, dtype)


_turns: defaultdict[tuple, threading.Lock] = defaultdict(threading.Lock)


@functools.lru_cache(maxsize=AHEAD + len(FIRST) * len(all_ops()))  # LAST comes after all ops at the first shapes
def _known(op: Op, rows: int, width: int, dtype: str) -> Known:
    of = sample(op.name, rows, width, dtype)
    args = arrays(jax.random.key(0), of.args)
    cotangents = arrays(jax.random.key(1), jax.eval_shape(functools.partial(run, op, REFERENCE, **of.constants), *args))
    return Known(args, cotangents, oracle(op, of.constants, args, cotangents))


def judged(op: Op, found: list[np.ndarray], exact: Oracle, rows: int, width: int, dtype: str) -> list[float]:
    """The greatest error of each result, in units of its tolerance."""
    of_rows = [trailing is not None for trailing in (*op.outputs, *op.gradients)]
    results = zip(found, exact.true, exact.rounded, of_rows, strict=True)
    return [_error(*result, rows, width, dtype) for result in results]


def _error(
    value: np.ndarray, true: np.ndarray, rounded: np.ndarray, of_rows: bool, rows: int, width: int, dtype: str
) -> float:
    """The greatest error in units of the tolerance, after division by the row's largest true value or, for sums over
    rows, by the root of the number of terms. The tolerance allows two roundings to the dtype, one of the stored value
    and one of what is computed from it. It also allows the effect of the documented intermediate roundings on this
    element, and ROUNDINGS times their root mean square over its row, because an implementation makes them in other
    places, with other errors of that size."""
    limits = shapes.tolerance(value.dtype, width if of_rows else max(rows, width))
    value = np.asarray(value, np.float64)
    if not np.isfinite(value).all():
        raise FloatingPointError("a result is not finite")
    if of_rows:
        unit = np.abs(true).max(axis=-1, keepdims=True) + 1e-30
    else:
        unit = math.sqrt(rows * width / max(true.size, 1))
        if dtype != "float32":  # a stored value may be rounded the other way: large terms are off by an ulp
            limits["atol"] += 16 * float(jnp.finfo(dtype).eps) / math.sqrt(rows)
    shift = np.abs(rounded - true)
    root_mean_square = np.sqrt(np.mean(shift**2, axis=-1 if of_rows else None, keepdims=of_rows))
    allowed = 2 * limits["rtol"] * np.abs(true) + limits["atol"] * unit + shift + ROUNDINGS * root_mean_square
    return float(np.max(np.abs(value - true) / allowed))
