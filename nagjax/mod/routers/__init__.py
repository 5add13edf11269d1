"""Routers: they score each token at a sublayer. One file per router; a new file in this folder is found by its name."""

import contextlib
import dataclasses
import sys
from functools import cache
from typing import ClassVar

from flax import nnx
from jaxtyping import Array, Float, UInt32

from nagjax.discovery import classes_by_file, pick
from nagjax.errors import UserError
from nagjax.layers.where import Where
from nagjax.residual.protocol import Boundary, Nothing, Scheme, Stream


@dataclasses.dataclass(frozen=True)
class Router:
    """Base of all routers: it has no parameters, and updates do not depend on the score."""

    name: ClassVar[str] = ""  # the file's name
    scale: ClassVar[float] = 0.0  # size of the terms whose difference is a score near 0: its rounding error is theirs

    common: ClassVar[bool] = False  # scores are positive, and those of different sublayers compare
    factor: ClassVar[bool] = False  # a factor made from the score stands before the update: the router learns by it
    judges: ClassVar[bool] = False  # the score says by itself whether a token runs: `odds`
    recalls: ClassVar[bool] = False  # the score is made of the matmul that `advance` needs, which is not done twice
    draws: ClassVar[bool] = False  # scores are random: they differ by a pass's noise alone
    passes: ClassVar[float] = 1.0  # over its own matmuls in training, in forward passes

    weight: str = "score"  # `ModConfig.weight`, for a router whose score is a factor

    def check(self, scheme: Scheme) -> None:
        """Raises UserError for a scheme that this router does not fit."""
        if self.factor and scheme.scale_free:
            own = f"take the router {scheme.router}"
            fix = f"{scheme.name} normalises every update, so a factor on it has no gradient: {own}"
            raise UserError("mod.router", self.name, fix)

    def multiply_adds(self, width: int, gate: float) -> float:
        """Multiply-adds of one token's score at a sublayer. gate: those of the sublayer's gate. width: D, or 0 if
        another sublayer computes the score."""
        return 0.0

    def parameters(self, width: int, rngs: nnx.Rngs) -> nnx.Module:
        """The router's parameters for one sublayer."""
        return Nothing()

    def score(
        self,
        scheme: Scheme,
        stream: Stream,
        own: nnx.Module,
        at: Boundary,
        where: Where,
        noise: UInt32[Array, ""],
    ) -> Float[Array, "B T"]:
        """The value of each token for the sublayer, float32, computed from the stream before it runs."""
        raise NotImplementedError

    def score_block(
        self,
        scheme: Scheme,
        stream: Stream,
        own: nnx.Module,
        at: tuple[Boundary, ...],
        where: Where,
        noise: UInt32[Array, ""],
    ) -> Float[Array, "B T"]:
        """`score` for a block whose attention and MLP run for the same tokens, computed from the stream before both."""
        return self.score(scheme, stream, own, at[0], where, noise)

    def odds(self, scores: Float[Array, "*B"]) -> Float[Array, "*B"]:
        """The log-odds that a token runs, float32. Only for a router that `judges`."""
        raise NotImplementedError

    def weigh(self, update: Float[Array, "B k D"], scores: Float[Array, "B k"]) -> Float[Array, "B k D"]:
        """The update that is committed. A router with parameters gets its gradient through this factor."""
        return update


@cache
def routers() -> dict[str, type[Router]]:
    """Every router by name."""
    return classes_by_file(sys.modules[__name__], Router)


def find_router(name: str, scheme: Scheme, weight: str = "sigmoid") -> Router:
    """The router of that name; "auto" is the scheme's own choice. Raises UserError for an unknown name and for a router
    that does not fit the scheme."""
    router = pick("mod.router", scheme.router if name == "auto" else name, routers(), "routers")(weight)
    router.check(scheme)
    return router


def routers_for(scheme: Scheme) -> dict[str, Router]:
    """Every router that fits the scheme, by name."""
    found = {}
    for name in routers():
        with contextlib.suppress(UserError):
            found[name] = find_router(name, scheme)
    return found
