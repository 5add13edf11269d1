"""Extra columns of a branch's first matmul, for the residual scheme around it.

A scheme may need a projection of the rows that its branch projects, too: NAG's modulator does. As a few more columns of
the branch's first matmul it costs less than as a matmul of its own, forward and backward. The sublayer offers them to
its branch; a branch that has its first weights side by side may compute them, and where none does the scheme will.
"""

import contextlib
from collections.abc import Generator
from contextvars import ContextVar

import jax.extend
from jaxtyping import Array, Float


class ExtraColumns:
    """The columns of `x weight` that a scheme needs. `product`: those a branch has computed, in x's dtype, or None."""

    def __init__(self, x: Float[Array, "B T D"], weight: Float[Array, "D C"]):
        self.x, self.weight = x, weight
        self.product: Float[Array, "B T C"] | None = None
        self.trace = _trace()


_offered: ContextVar[ExtraColumns | None] = ContextVar("extra_columns", default=None)


@contextlib.contextmanager
def offering(extra: ExtraColumns | None) -> Generator[None]:
    """A branch that runs inside may compute these columns."""
    token = _offered.set(extra)
    try:
        yield
    finally:
        _offered.reset(token)


def extra_columns(x: Array) -> ExtraColumns | None:
    """What a matmul of x may compute, too. None for any other array than the scheme's, such as x in another dtype; if
    it is computed already; and inside a transformation such as vmap that closes over x, which it could not leave."""
    extra = _offered.get()
    if extra is None or extra.product is not None:
        return None
    return extra if extra.x is x and extra.trace == _trace() else None


def _trace() -> object:
    return jax.extend.core.get_opaque_trace_state(convention="nnx")
