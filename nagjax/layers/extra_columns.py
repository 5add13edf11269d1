"""Extra columns of a branch's first product, for the residual scheme around it.

A scheme may need a projection of the rows that its branch projects, too: NAG's modulator does. As a few more columns of
the branch's first product it costs less than as a product of its own, forward and backward. The sublayer asks for it,
and a branch that has its first weights side by side anyway answers; otherwise the scheme computes it itself.
"""

import contextlib
from collections.abc import Generator
from contextvars import ContextVar

import jax.extend
from jaxtyping import Array, Float


class Request:
    """Asks a branch that reads x for the product of x and a weight. `product` is the answer, in x's dtype."""

    def __init__(self, x: Float[Array, "B T D"], weight: Float[Array, "D C"]):
        self.x, self.weight = x, weight
        self.product: Float[Array, "B T C"] | None = None
        self.trace = _trace()


_request: ContextVar[Request | None] = ContextVar("request", default=None)


@contextlib.contextmanager
def asking(request: Request | None) -> Generator[None]:
    """A branch that runs inside may answer the request."""
    token = _request.set(request)
    try:
        yield
    finally:
        _request.reset(token)


def asked(x: Array) -> Request | None:
    """The open request for a product of x. None for any other array, such as x in another dtype, and inside a
    transformation such as vmap that closes over x, from which an answer could not be returned."""
    request = _request.get()
    if request is None or request.product is not None:
        return None
    return request if request.x is x and request.trace == _trace() else None


def _trace() -> object:
    return jax.extend.core.get_opaque_trace_state(convention="nnx")
