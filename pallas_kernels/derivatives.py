"""Kernels are differentiated once, by their own backward pass; a second derivative raises an error that says so."""

import functools
from collections.abc import Callable

import jax


@functools.lru_cache
def once(op: str) -> Callable[[tuple], tuple]:
    """The identity on a tuple of arrays; differentiating it raises NotImplementedError."""

    @jax.custom_jvp
    def same(arrays):
        return arrays

    @same.defjvp
    def refuse(primals, tangents):
        fix = "give implementation='xla', or trace inside pallas_kernels.using('xla')"
        raise NotImplementedError(f"{op}: its kernels have no second derivative; {fix}")

    return same
