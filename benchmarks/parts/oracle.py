"""The expected results of an op: its reference in float64, with every rounding that the reference makes.

An op rounds on purpose: the norm in `add_rms_norm` is that of the sum as it is stored, and a gradient in which two
terms cancel depends on that. So the reference is traced with its actual dtypes, and its program is then run in float64,
where each value of a dtype narrower than float32 is rounded to that dtype. A gradient passes through such a rounding
unchanged.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np

from pallas_kernels.bench import with_gradients
from pallas_kernels.dispatch import REFERENCE, Op, run
from pallas_kernels.ops import modulator


class Oracle(NamedTuple):
    """Outputs followed by gradients, all float64. `true`: gradients are never rounded. `rounded`: gradients are rounded
    wherever the reference's own derivative rounds, and matrices have the 16 bits with which kernels multiply bfloat16
    rows. The difference of the two shows how large the errors of an implementation that rounds as documented may be."""

    true: list[np.ndarray]
    rounded: list[np.ndarray]


def oracle(op: Op, constants: dict, args: Sequence[jax.Array], cotangents: Sequence[jax.Array]) -> Oracle:
    """Computes the expected results on the CPU, from these inputs as they are (already rounded)."""
    reference = functools.partial(run, op, REFERENCE, **constants)
    forward = jax.make_jaxpr(reference)(*args)
    true = functools.partial(with_gradients, lambda *args: tuple(_run(forward, args)))
    if not any(_narrow(x.dtype) for x in args):
        return Oracle(*2 * (_in_float64(true, tuple(args), tuple(cotangents)),))
    both = jax.make_jaxpr(functools.partial(with_gradients, reference))(tuple(args), tuple(cotangents))
    of_bits = [_of_16_bits(x) if of is None and x.ndim == 2 else x for of, x in zip(op.inputs, args, strict=True)]
    return _in_float64(
        lambda args, of_bits, cotangents: Oracle(true(args, cotangents), _run(both, (*of_bits, *cotangents))),
        *(tuple(args), tuple(of_bits), tuple(cotangents)),
    )


def _in_float64(function: Callable, *args: tuple[jax.Array, ...]):
    wide = jax.tree.map(_wide, jax.device_get(args))
    with jax.enable_x64(True), jax.default_device(jax.devices("cpu")[0]):
        return jax.device_get(jax.jit(function)(*wide))


def _of_16_bits(matrix: jax.Array) -> jax.Array:
    return sum(half.astype(matrix.dtype) for half in modulator.split(matrix))


def _run(program: jax.extend.core.ClosedJaxpr, args: Sequence[jax.Array]) -> list[jax.Array]:
    """The program's results in float64."""
    known = dict(zip(program.jaxpr.constvars, map(_wide, jax.device_get(program.consts)), strict=True))
    known |= dict(zip(program.jaxpr.invars, args, strict=True))
    value = lambda x: _wide(x.val) if isinstance(x, jax.extend.core.Literal) else known[x]  # noqa: E731
    for step in program.jaxpr.eqns:
        inputs = [value(x) for x in step.invars]
        if "jaxpr" in step.params:  # a jitted function
            results = _run(step.params["jaxpr"], inputs)
        elif step.primitive is jax.lax.scatter_add_p:  # contains an addition in the narrow dtype
            names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
            results = [jax.lax.scatter_add(*inputs, **{name: step.params[name] for name in names})]
        else:
            options = step.params | {k: jnp.float64 for k, x in step.params.items() if _is_float(x)}
            results = step.primitive.bind(*inputs, **options)
            results = results if step.primitive.multiple_results else [results]
        rounded = [_stored(x, var.aval.dtype) for x, var in zip(results, step.outvars, strict=True)]
        known |= dict(zip(step.outvars, rounded, strict=True))
    return [value(x) for x in program.jaxpr.outvars]


def _is_float(option: object) -> bool:
    """Whether a primitive's option is a dtype for its computation."""
    return isinstance(option, np.dtype) and jnp.issubdtype(option, jnp.floating)


def _wide(x):
    return np.asarray(x, np.float64) if jnp.issubdtype(jnp.result_type(x), jnp.floating) else x


def _stored(x: jax.Array, dtype: np.dtype) -> jax.Array:
    """x rounded to this dtype; its gradient passes as if it were not rounded."""
    if not _narrow(dtype):
        return x
    of = jnp.finfo(dtype)
    return x + jax.lax.stop_gradient(jax.lax.reduce_precision(x, of.nexp, of.nmant) - x)


def _narrow(dtype: np.dtype) -> bool:
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32
