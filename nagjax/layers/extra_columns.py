"""Extra columns of a branch's first matmul, computed for the residual scheme around the branch.

A scheme may project the same rows as its branch does; NAG's modulator is an example. As a few more columns of the
branch's first matmul this projection costs less than as a matmul of its own, forward and backward. The sublayer offers
the columns to its branch. A branch that joins its first weights into one matmul may compute them; if no branch does,
the scheme computes them.
"""

import contextlib
from collections.abc import Generator
from contextvars import ContextVar

import jax.extend
from jaxtyping import Array, Float


class ExtraColumns:
    """The columns of `x weight` that a scheme needs. `product`: the result, in x's dtype, once a branch has computed
    it; else None."""

    def __init__(self, x: Float[Array, "B T D"], weight: Float[Array, "D C"]):
        self.x, self.weight = x, weight
        self.product: Float[Array, "B T C"] | None = None
        self.trace = _trace()


_offered: ContextVar[ExtraColumns | None] = ContextVar("extra_columns", default=None)


@contextlib.contextmanager
def offering(extra: ExtraColumns | None) -> Generator[None]:
    """A branch that runs inside this context may compute these columns."""
    token = _offered.set(extra)
    try:
        yield
    finally:
        _offered.reset(token)


def extra_columns(x: Array) -> ExtraColumns | None:
    """The columns that a matmul of x may compute for the scheme. None if x is not the scheme's array (it may be a copy
    in another dtype), if the columns are already computed, and inside a transformation such as vmap that closes over x,
    since the product could not leave it."""
    extra = _offered.get()
    if extra is None or extra.product is not None:
        return None
    return extra if extra.x is x and extra.trace == _trace() else None


def _trace() -> object:
    return jax.extend.core.get_opaque_trace_state(convention="nnx")
