"""Kernels are differentiated once, by their own backward pass; a second derivative raises an error that says so."""

import jax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

# A primitive, because JAX drops a custom_jvp rule in what it computes ahead of a loop.
_once_p = Primitive("kernel_operands")
_once_p.multiple_results = True


def once(op: str, arrays: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
    """The arrays; differentiating them raises NotImplementedError."""
    return tuple(_once_p.bind(*arrays, op=op))


def _refuse(primals, tangents, *, op):
    fix = "give implementation='xla', or trace inside pallas_kernels.using('xla')"
    raise NotImplementedError(f"{op}: its kernels have no second derivative; {fix}")


_once_p.def_impl(lambda *arrays, op: arrays)
_once_p.def_abstract_eval(lambda *arrays, op: arrays)
mlir.register_lowering(_once_p, lambda ctx, *arrays, op: arrays)
ad.primitive_jvps[_once_p] = _refuse
batching.primitive_batchers[_once_p] = lambda arrays, axes, *, op: (_once_p.bind(*arrays, op=op), axes)
