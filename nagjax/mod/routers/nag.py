"""The NAG router: the angle a sublayer is about to turn a token."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from nagjax.errors import UserError
from nagjax.mod.routers import Router


@dataclasses.dataclass(frozen=True)
class NAGRouter(Router):
    """`score = |t|`, `t = alpha_l m_l(r)` the tangent of the coming rotation: no parameters of its own. A step size
    that has learned to be negative turns as far as its positive.

    The modulator learns through the update it scales, so the score itself needs no gradient. The idea is
    of Figliolia & Millidge 2026, arXiv:2606.16112; capacities and thresholds on the angle are this project's design.
    A block's score is the sum of its two, both of the direction before it: what the MLP is going to do once attention
    has turned the token is not known then.
    """

    name: ClassVar[str] = "nag"
    common: ClassVar[bool] = True
    recalls: ClassVar[bool] = True

    def check(self, scheme):
        if not scheme.turns:
            fix = f"scheme {scheme.name} has no rotation angle to route by: take the router {scheme.router}, "
            fix += "or the scheme nag"
            raise UserError("mod.router", self.name, fix)

    def multiply_adds(self, width, gate):
        return gate

    def score(self, scheme, stream, own, at, where, noise):
        return jnp.abs(scheme.turn(stream, at))

    def score_block(self, scheme, stream, own, at, where, noise):
        return jnp.abs(scheme.turn(stream, at[0])) + jnp.abs(scheme.turn(stream, at[1]))
