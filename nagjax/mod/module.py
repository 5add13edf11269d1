"""Mixture-of-Depths around your own branches: `nagjax.MixtureOfDepths`."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, UInt32

from nagjax.errors import UserError
from nagjax.layers.branch import Mixing
from nagjax.layers.where import Where
from nagjax.mod.config import ModConfig, Rate, kept
from nagjax.mod.cuts import check_cuts, decay_after, mean_cut, moved_cut
from nagjax.mod.routed import ForwardContext, MoD, Routing, Site
from nagjax.parameters import STACKED, check_rngs, shapes_of
from nagjax.ranges import Natural, Seed, check_value
from nagjax.residual.arguments import say, split_by
from nagjax.residual.module import OpenStream, Residual, Slot, opened
from nagjax.residual.protocol import Boundary
from nagjax.residual.stacks import unstacked


class Routed(NamedTuple):
    """What one sublayer did, or all sublayers with a leading axis S: which tokens ran; each sequence's cut, the score
    of its last token that was let in (-inf if it has fewer real tokens than places, or if no top-k chooses); and each
    sequence's loss of the decider (0 for a threshold)."""

    ran: Bool[Array, "*S B T"]
    cut: Float[Array, "*S B"]
    loss: Float[Array, "*S B"]

    def averaged_cuts(
        self,
        cuts: Float[Array, "*S"] | None = None,
        decay: float = 0.99,
        *,
        step: int | Int[Array, ""] | None = None,
    ) -> Float[Array, "*S"]:
        """The averages that a threshold compares with, after one training step: the moving average of `cut` over the
        sequences that have one. cuts: the averages after the step before; None before the first. An average stays as it
        is if no sequence has a cut. -inf, which lets every token in, means that no cut is known yet.

        step: number of training steps before this one. The decay is then min(decay, step / (step + 10)), as in nagjax's
        trainer. Without it the decay is constant. With a constant decay of 0.99, a training of a few hundred steps does
        not forget its first cuts, and those of NAG, whose angles start at 0, let too many tokens in.

        Raises UserError for a `step` that is not a whole number from 0 on, and for `cuts` of another shape.
        """
        if step is not None and not isinstance(step, jax.core.Tracer):
            check_value("step", np.asarray(step).item(), Natural, "it counts training steps from 0")
        mean, rows = mean_cut(self.cut)
        if cuts is None:
            return mean
        if np.shape(cuts) != np.shape(mean):
            raise UserError("cuts", np.shape(cuts), f"give those of the step before, {list(np.shape(mean))}")
        return moved_cut(cuts, mean, rows, decay if step is None else decay_after(step, decay))


class MixtureOfDepths(nnx.Module):
    """A residual whose branches run on a share of a sequence's tokens: of T tokens `ceil((1 - rate) T)` run and the
    others pass (Raposo et al. 2024, arXiv:2404.02258). Rows are [B, T, D].

    A branch works token by token, `branch(x [B, k, D]) -> [B, k, D]`. A branch whose tokens read each other takes
    queries separately from keys and values, and has two methods for this: `keys_values(x, where)` for all tokens, and
    `mix(x, where, known, seen)` for those that run (`nagjax.layers.branch.Mixing`).

    residual: the module to route (`nagjax.NAG(...)`), kept as `residual`. rate: share of the tokens that skip. router:
    nag, linear, skip_class or random; auto takes the scheme's own, which is random if the scheme normalises updates
    (except for NAG). decider: which rule lets a token in at sampling time, when there are no later tokens to compare
    with: threshold, predictor, aux_loss, balance. The last three are trained: add their weighted loss to yours;
    nagjax's trainer adds 0.01 * routed.loss.mean() (nats). rngs: for a router or decider with parameters.

    Raises UserError for a residual that is not a nagjax module, a rate outside [0, 1), a router that does not fit the
    scheme, a decider that does not fit the router, and parameters without rngs.
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
        if not isinstance(residual, Residual):
            raise UserError("residual", residual, "give a module such as nagjax.NAG(width, sublayers, rngs=rngs)")
        check_value("rate", rate, Rate, "the share of the tokens that skip")
        self.residual, self.rate = residual, rate
        try:
            self.rules = MoD.of(residual.scheme, ModConfig(rate=(rate,), router=router, decider=decider), context=0)
        except UserError as error:
            raise UserError(error.field.removeprefix("mod."), error.value, error.fix) from None
        make = functools.partial(Routing, self.rules.router, self.rules.decider, residual.width)
        needed = jax.tree.leaves(shapes_of(lambda: make(nnx.Rngs(0))))
        if needed and rngs is None:
            raise UserError(
                "rngs", None, f"the {self.rules.router.name} router or its decider has parameters: give some"
            )
        if rngs is not None:
            check_rngs(rngs)
        rngs = nnx.Rngs(0) if rngs is None else rngs
        self.routing = nnx.vmap(make, transform_metadata=STACKED)(rngs.split(residual.sublayers))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        branches: Sequence[Callable],
        *,
        where: Where | None = None,
        progress: float | Float[Array, ""] | None = None,
        cuts: Float[Array, " S"] | None = None,
        causal: bool = False,
        noise: int | UInt32[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], Routed]:
        """Runs x through all sublayers. Returns the result, [B, T, D] in x's dtype, and what each sublayer did, leaves
        [S, ...].

        where: the tokens' documents and positions; by default each row is one document; segment 0 is padding, which
        never takes a token's place. causal: the decider lets tokens in without looking at later ones; a threshold needs
        `cuts` [S], the `Routed.averaged_cuts` of the training steps. noise: the number by which a random router draws,
        in training that of the step. Default 0, with a warning if the router is random: then the same places skip in
        every pass.

        Raises UserError for branches that are not a list of S callables, and what `advance` raises.
        """
        sublayers = self.residual.sublayers
        listed = list(branches) if isinstance(branches, Sequence | nnx.List) else None
        if listed is None or len(listed) != sublayers:
            given = type(branches).__name__ if listed is None else len(listed)
            raise UserError("branches", given, f"give a list of {sublayers} callables, one for a sublayer")
        check_cuts(cuts, sublayers)
        if cuts is not None and not causal:
            raise UserError("cuts", np.shape(cuts), "top-k does not read them: give causal=True, or leave them out")
        noise = self._number(noise)
        stream, done = self.residual.open(x, progress), []
        self._check("x", stream, "cuts", cuts, causal)
        parts = unstacked((self.residual.slots(), self.routing))
        for branch, (slot, own), cut in zip(listed, parts, [None] * sublayers if cuts is None else cuts, strict=True):
            stream, routed = self._run(stream, branch, slot, own, where=where, cut=cut, causal=causal, noise=noise)
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
        noise: int | UInt32[Array, ""] | None = None,
    ) -> tuple[OpenStream, Routed]:
        """The stream after sublayer i (1 .. S), whose branch runs here for the chosen tokens only, and what the
        sublayer did: `Routed` with ran [B, T], cut and loss [B]. For each i, a gradient through this method is as large
        as all sublayers' parameters; a gradient through a call of the module is not.

        where, causal, noise: as in a call. cut: the sublayer's own entry of `Routed.averaged_cuts`. Raises UserError
        for an i outside of 1 .. S, rows that are not [B, T, D], a `where` of other shapes, a threshold without a cut if
        `causal`, and a cut if not.
        """
        self._check("stream", opened(stream), "cut", cut, causal)
        slot, noise = self.residual.slot(i), self._number(noise)
        own = jax.tree.map(lambda all: all[i - 1], self.routing)
        if cut is not None and not causal:
            raise UserError("cut", np.shape(cut), "top-k does not read it: give causal=True, or leave it out")
        return self._run(stream, branch, slot, own, where=where, cut=cut, causal=causal, noise=noise)

    def _check(self, rows: str, stream: OpenStream, thresholds: str, given: Any, causal: bool) -> None:
        """Checks the shape of the rows, and that thresholds are given where they are needed. `rows`, `thresholds`: the
        caller's names of its arguments."""
        if len(stream.lead) != 2:
            raise UserError(rows, (*stream.lead, self.residual.width), "tokens are chosen within sequences: [B, T, D]")
        split = split_by(jax.tree.leaves(stream.rows)[0])
        if split[1] is not None:
            fix = "tokens of a sequence are chosen together, but an Explicit mesh splits them: reshard to split axis 0"
            raise UserError(rows, str(split), fix)
        if causal and given is None and self.rules.decider.needs_cuts:
            fix = "a threshold compares with Routed.averaged_cuts of the training: give them"
            raise UserError(thresholds, None, fix)

    def _number(self, noise: Any) -> int | UInt32[Array, ""]:
        """The number by which a random router draws."""
        if noise is None:
            if self.rules.router.draws:
                say("a random router draws the same tokens in every pass: pass noise=step in training, 0 afterwards")
            return 0
        if not jnp.issubdtype(jnp.result_type(noise), jnp.integer):
            raise UserError("noise", noise, "give the step's number, a whole one")
        if not isinstance(noise, jax.core.Tracer):
            check_value("noise", np.asarray(noise).item(), Seed, "the step's number")
        return noise

    def _run(
        self,
        stream: OpenStream,
        branch: Any,
        slot: Slot,
        own: nnx.Module,
        *,
        where: Where | None,
        cut: Float[Array, ""] | None,
        causal: bool,
        noise: int | UInt32[Array, ""],
    ) -> tuple[OpenStream, Routed]:
        if not callable(branch) and not isinstance(branch, Mixing):
            fix = "give a callable, which runs here, or one with keys_values and mix; not the update that it makes"
            raise UserError("branch", type(branch).__name__, fix)
        if cut is not None and np.shape(cut):
            raise UserError("cut", np.shape(cut), "give one number for the sublayer, of Routed.averaged_cuts")
        where = Where.whole(*stream.lead) if where is None else where
        given = [np.shape(part) for part in where] if isinstance(where, Where) else type(where).__name__
        if given != [stream.lead] * len(Where._fields):
            fix = f"give nagjax.layers.where.Where of segments and positions, {list(stream.lead)} each"
            raise UserError("where", given, fix)
        at = Boundary(*slot, stream.progress, self.residual.sublayers)
        cut = jnp.float32(0.0) if cut is None else cut
        ctx = ForwardContext(where, stream.progress, jnp.asarray(noise, jnp.uint32), causal)
        (result,) = self.rules.run(stream.rows, (Site(branch, own, at, cut, self.rate),), None, ctx)
        return stream.replaced(result.stream), Routed(result.ran, result.notes["cut"], result.notes["loss"])

    def kept(self, tokens: int) -> int:
        """The number of tokens that run in a sequence of `tokens`."""
        return kept(self.rate, tokens)
