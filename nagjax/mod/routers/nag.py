"""The NAG router: it scores a token by the angle by which a sublayer is about to rotate it."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from nagjax.errors import UserError
from nagjax.mod.routers import Router


@dataclasses.dataclass(frozen=True)
class NAGRouter(Router):
    """`score = |t|`, `t = alpha_l m_l(r)` the tangent of the coming rotation: no parameters of its own. A negative step
    size rotates as far as the positive one of the same size.

    The modulator learns through the update that it scales, so the score itself needs no gradient. The idea is that of
    Figliolia & Millidge 2026, arXiv:2606.16112; capacities and thresholds on the angle are this project's design. The
    score of a block is the sum of the scores of its two sublayers, both computed from the direction before the block:
    how far the MLP will rotate the token after attention is not known then.
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
