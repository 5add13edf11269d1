"""Mixture-of-Depths around anybody's branches: `nagjax.MixtureOfDepths`."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from nagjax.errors import UserError
from nagjax.layers.where import Where
from nagjax.mod.config import ModConfig, kept
from nagjax.mod.routed import ForwardContext, MoD, Routing, Site
from nagjax.parameters import STACKED
from nagjax.residual.module import OpenStream, Residual
from nagjax.residual.protocol import Boundary


class Routed(NamedTuple):
    """What a sublayer did: which tokens ran, the score of the last one let in (each sequence's), and the decider's own
    loss (each sequence's; 0 for a threshold)."""

    ran: Bool[Array, "B T"]
    cut: Float[Array, " B"]
    loss: Float[Array, " B"]


class MixtureOfDepths(nnx.Module):
    """A residual whose branches run on a share of a sequence's tokens: of T, `ceil((1 - rate) T)` run and the others
    pass (Raposo et al. 2024, arXiv:2404.02258). Rows are [B, T, D].

    A branch works token by token, `branch(x [B, k, D]) -> [B, k, D]`; or, where its tokens read each other, it takes
    queries apart from keys and values and says so by two methods: `keys_values(x, where)` and `mix(x, where, known,
    seen)` (`nagjax.layers.branch.Mixing`; every token's keys and values are there, queries are only of those that run).

    residual: the module it routes (`nagjax.NAG(...)`), kept as `residual`. rate: share of the tokens that skip. router:
    nag, linear, skip_class or random; auto is the scheme's own. decider: who lets a token in at sampling time, when
    later tokens are not there to compare with: threshold, predictor, aux_loss, balance. rngs: for a router or decider
    with parameters.

    Raises UserError for a rate outside [0, 1), a router that does not fit the scheme, a decider that does not fit the
    router, and parameters without rngs.
    """

    def __init__(
        self,
        residual: Residual,
        rate: float = 0.25,
        *,
        rngs: nnx.Rngs | None = None,
        router: str = "auto",
        decider: str = "threshold",
    ):
        if not 0.0 <= rate < 1.0:
            raise UserError("rate", rate, "give a share of skipped tokens in [0, 1)")
        self.residual, self.rate = residual, rate
        self.rules = MoD.of(residual.scheme, ModConfig(rate=(rate,), router=router, decider=decider), context=0)
        make = functools.partial(Routing, self.rules.router, self.rules.decider, residual.width)
        needed = jax.tree.leaves(nnx.eval_shape(lambda: make(nnx.Rngs(0))))
        if needed and rngs is None:
            raise UserError(
                "rngs", None, f"the {self.rules.router.name} router or its decider has parameters: give some"
            )
        rngs = rngs or nnx.Rngs(0)
        self.routing = nnx.vmap(make, transform_metadata=STACKED)(rngs.split(residual.sublayers))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        branches: list[Callable],
        *,
        where: Where | None = None,
        progress: float | Float[Array, ""] | None = None,
        cuts: Float[Array, " S"] | None = None,
        causal: bool = False,
    ) -> tuple[Float[Array, "B T D"], Routed]:
        """x through all sublayers, and what each of them did, leaves [S, ...].

        where: the tokens' documents and positions; whole rows unless given; segment 0 is padding, which never takes a
        token's place. causal: tokens are let in by the decider, one after the other, by `cuts` [S] for a threshold:
        averages over training of `Routed.cut`.
        """
        if len(branches) != self.residual.sublayers:
            raise UserError("branches", len(branches), f"give {self.residual.sublayers} callables, one for a sublayer")
        stream, done = self.residual.open(x, progress), []
        for i, branch in enumerate(branches, 1):
            cut = None if cuts is None else cuts[i - 1]
            stream, routed = self.advance(stream, branch, i, where=where, cut=cut, causal=causal)
            done.append(routed)
        return self.residual.close(stream), jax.tree.map(lambda *each: jnp.stack(each), *done)

    def advance(
        self,
        stream: OpenStream,
        branch: Any,
        i: int | Int[Array, ""],
        *,
        where: Where | None = None,
        cut: Float[Array, ""] | None = None,
        causal: bool = False,
    ) -> tuple[OpenStream, Routed]:
        """The stream behind sublayer i, whose branch reads, runs and is committed here: only for the tokens chosen."""
        if len(stream.lead) != 2:
            raise UserError("x", (*stream.lead, self.residual.width), "tokens are chosen within sequences: [B, T, D]")
        if causal and cut is None and self.rules.decider.needs_cuts:
            raise UserError("cuts", None, "a threshold compares with averages of Routed.cut over training: give them")
        where = Where.whole(*stream.lead) if where is None else where
        at = Boundary(*self.residual.slot(i), stream.progress, self.residual.sublayers)
        own = jax.tree.map(lambda all: all[i - 1], self.routing)
        cut = jnp.float32(0.0) if cut is None else cut
        ctx = ForwardContext(where, stream.progress, jnp.uint32(0), causal)
        result = self.rules.run(stream.rows, Site(branch, own, at, cut, self.rate), None, ctx)
        return stream.replaced(result.stream), Routed(result.ran, result.notes["cut"], result.notes["loss"])

    def kept(self, tokens: int) -> int:
        """Tokens that run of so many."""
        return kept(self.rate, tokens)
