"""Causal deciders: rules that say, without looking at later tokens, whether a token runs. One file per decider."""

import dataclasses
import sys
from functools import cache
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float

from nagjax.discovery import classes_by_file, pick
from nagjax.errors import UserError
from nagjax.mod.routers import Router
from nagjax.residual.protocol import Nothing


@dataclasses.dataclass(frozen=True)
class Decider:
    """Base of all deciders. A token runs where `logits` is at least 0."""

    name: ClassVar[str] = ""  # the file's name
    trained: ClassVar[bool] = True  # its own loss joins the language model's
    needs_odds: ClassVar[bool] = False  # it is the router that judges
    needs_cuts: ClassVar[bool] = False  # the moving averages of the top-k cuts

    def check(self, router: Router) -> None:
        """Raises UserError for a router whose scores this decider cannot use."""
        if self.needs_odds and not router.judges:
            fix = f"the {router.name} router's score is not a logit: take the decider threshold or predictor"
            raise UserError("mod.decider", self.name, fix)

    def learns(self, router: Router) -> bool:
        """Whether routing has a loss or a factor on updates. Then the sublayer is routed even if rounding leaves no
        token out."""
        return self.trained or router.factor

    def parameters(self, width: int, rngs: nnx.Rngs) -> nnx.Module:
        """The decider's parameters for one sublayer."""
        return Nothing()

    def logits(
        self,
        own: nnx.Module,
        router: Router,
        x: Float[Array, "B T D"],
        scores: Float[Array, "B T"],
        cut: Float[Array, ""],
    ) -> Float[Array, "B T"]:
        """Float32 logits, from the sublayer's input, the router's scores, and the average cut, lowered by its margin.
        The default is the log-odds of the router."""
        return router.odds(scores)

    def loss(
        self, logits: Float[Array, "B T"], chosen: Bool[Array, "B T"], real: Bool[Array, "B T"]
    ) -> Float[Array, " B"]:
        """The loss of each sequence, for a decider that is trained: the binary cross-entropy in nats against "was in
        the top k", averaged over the tokens that are not padding."""
        losses = jax.nn.softplus(logits) - chosen * logits
        return jnp.sum(losses * real, axis=-1) / jnp.maximum(jnp.sum(real, axis=-1), 1)


@cache
def deciders() -> dict[str, type[Decider]]:
    """Every decider by name."""
    return classes_by_file(sys.modules[__name__], Decider)


def find_decider(name: str, router: Router) -> Decider:
    """The decider of that name. Raises UserError for an unknown name and for a decider that does not fit the router."""
    decider = pick("mod.decider", name, deciders(), "deciders")()
    decider.check(router)
    return decider
