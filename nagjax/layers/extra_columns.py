"""Extra columns of a branch's first product, for the residual scheme around it.

A scheme may need a projection of the rows that its branch projects, too: NAG's modulator does. As a few more columns of
the branch's first product it costs less than as a product of its own, forward and backward. The sublayer asks for it,
and a branch that has its first weights side by side anyway answers; otherwise the scheme computes it itself.
"""

import contextlib
from collections.abc import Generator
from contextvars import ContextVar

from jaxtyping import Array, Float


class Request:
    """For the product of x with a weight, for one that stands on its right. `product` is the answer, in x's dtype."""

    def __init__(self, x: Float[Array, "B T D"], weight: Float[Array, "D C"]):
        self.x, self.weight = x, weight
        self.product: Float[Array, "B T C"] | None = None


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
    """The request that is open for the product of x; None for any other array, such as x in another dtype."""
    request = _request.get()
    return request if request is not None and request.x is x and request.product is None else None
