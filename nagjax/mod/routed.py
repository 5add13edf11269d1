"""Runs a sublayer on some of the tokens: chosen by capacity in training, and by a causal decision when sampling.

The notes in a sublayer's result say per sequence what was done. cut: score of the last token let in; -inf if that is
padding, if no token is left out, and if no top-k chooses. loss: the decider's own. executed: share of the tokens that
ran. agreement: share of the tokens for which the causal decision is the choice made here. With adaptive depth also
computed: share of the places that were computed; and above: shares of the tokens that score above each threshold of a
grid. Padding does not count.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, UInt32

from nagjax.errors import UserError
from nagjax.layers.branch import Choosing, Mixing, Update, between, fitting, update_by_token, update_of
from nagjax.layers.cache import CachedLayer
from nagjax.layers.where import Where
from nagjax.mod import adaptive, ragged
from nagjax.mod.cache import HIDDEN, with_room_by_document
from nagjax.mod.config import ModConfig, kept
from nagjax.mod.cuts import mean_cut
from nagjax.mod.deciders import Decider, find_decider
from nagjax.mod.routers import Router, find_router, routers_for
from nagjax.mod.selection import is_chosen, lowered, on_any_device, scattered, top_tokens
from nagjax.residual import Boundary, Scheme, Stream
from nagjax.residual.protocol import Nothing, fitting_result, mean_gate
from nagjax.residual.recalled import recalled
from nagjax.residual.rows import put, take
from nagjax.residual.sublayer import Result, run
from nagjax.residual.sublayer import kept as where_ran

Cache = CachedLayer | None


class ForwardContext(NamedTuple):
    """What all sublayers of one forward pass share."""

    where: Where
    progress: Float[Array, ""]
    noise: UInt32[Array, ""]  # number by which the random router draws
    causal: bool  # tokens are chosen by the causal decider instead of by top-k
    pin: Callable[[Array], Array] = lambda x: x  # keeps activations [B, T, ...] split over devices as rows are
    lossless: bool = False  # experts drop no token: when sampling
    begins: bool = False  # this pass is the first of its cache


class Routing(nnx.Module):
    """One sublayer's Mixture-of-Depths parameters, of its router and its decider."""

    def __init__(self, router: Router, decider: Decider, width: int, rngs: nnx.Rngs):
        self.router = router.parameters(width, rngs)
        self.decider = decider.parameters(width, rngs)


class Site(NamedTuple):
    """One sublayer: its branch, its routing parameters, its boundary, its average cut, and the share of tokens that
    skip it."""

    branch: Any
    routing: Any  # `Routing`, or `Nothing`
    at: Boundary
    cut: Float[Array, ""]
    rate: float


Sites = tuple[Site, ...]  # sublayers that run for the same tokens: one, or a block's attention and MLP


@dataclasses.dataclass(frozen=True)
class MoD:
    """The rules by which the sublayers of one model are routed."""

    scheme: Scheme
    config: ModConfig
    context: int
    router: Router
    decider: Decider
    dtype: jax.typing.DTypeLike = jnp.float32  # of the branches' computation; it sets the scores' rounding

    @classmethod
    def of(cls, scheme: Scheme, config: ModConfig, context: int, dtype: jax.typing.DTypeLike = jnp.float32) -> "MoD":
        """The rules of a model. Raises UserError for a router that does not fit the scheme or adaptive capacity, and
        for a decider that does not fit the router."""
        router = find_router(config.router, scheme, config.weight)
        if config.adaptive and not router.common:
            known = ", ".join(name for name, own in routers_for(scheme).items() if own.common)
            fix = f"no threshold is common to the {router.name} router's scores: use --mod.router {known}"
            raise UserError("mod.capacity", config.capacity, fix)
        return cls(scheme, config, context, router, find_decider(config.decider, router), dtype)

    def parameters(self, kind: Literal["attention", "mlp"], width: int, rngs: nnx.Rngs) -> nnx.Module:
        """One sublayer's routing parameters. Blocks are stacked, so the unrouted blocks between routed ones have them
        as well. A block that is routed as a whole has those of its attention only."""
        own = self.config.routes(kind) and not (kind == "mlp" and self.config.unit == "block")
        return Routing(self.router, self.decider, width, rngs) if own else Nothing()

    def run(self, stream: Stream, sites: Sites, cache: Cache, ctx: ForwardContext) -> tuple[Result, ...]:
        """Runs sublayers for the same tokens, which are chosen before the first one: all tokens at rate 0, none at rate
        1, otherwise those that the rule chooses. Raises UserError for top-k with a cache."""
        tokens, rate = ctx.where.positions.shape[1], sites[0].rate
        if 0.0 < rate < 1.0 and tokens:
            if ctx.causal:
                return self._decided(stream, sites, cache, ctx)
            if cache is not None:
                raise UserError("causal", False, "top-k looks at later tokens: a pass with a cache needs causal=True")
            if self.config.adaptive:
                return self._by_threshold(stream, sites, ctx)
            k = kept(rate, tokens)
            if k < tokens or self.decider.learns(self.router):
                return self._by_capacity(stream, sites, ctx, k)
        whole, results = self._none if rate == 1.0 else self._all, []
        for site in sites:
            results.append(whole(stream, site, cache, ctx))
            stream, cache = results[-1].stream, results[-1].cache
        return tuple(results)

    def room(self, rate: float) -> int:
        """The number of tokens of a context for which attention to selected tokens has room."""
        return self.context if self.config.adaptive else kept(rate, self.context)

    def _notes(self, ran: Bool[Array, "B T"], **values: Any) -> dict[str, Float[Array, "B ..."]]:
        values = {"cut": -jnp.inf, "loss": 0.0} | values
        if self.config.adaptive:
            values = {"computed": values["executed"]} | values
        notes = {name: jnp.broadcast_to(jnp.float32(value), ran.shape[:1]) for name, value in values.items()}
        return notes | ({"above": jnp.zeros((ran.shape[0], adaptive.GRID))} if self.config.adaptive else {})

    def _all(self, stream, site: Site, cache: Cache, ctx: ForwardContext) -> Result:
        result = run(self.scheme, stream, lambda x: _update(site.branch, x, cache, ctx), site.at, ctx.pin)
        return result._replace(notes=self._notes(result.ran, executed=1.0, agreement=1.0))

    def _none(self, stream, site: Site, cache: Cache, ctx: ForwardContext) -> Result:
        nobody = jnp.zeros(ctx.where.positions.shape, bool)
        gate = jnp.zeros((*nobody.shape, 1))
        notes, after = self._notes(nobody, executed=0.0, agreement=1.0), self.scheme.skip(stream, site.at)
        return Result(after, cache, gate, nobody, notes, _no_notes(site.branch, self.scheme.read(stream)))

    def _scores(self, stream, sites: Sites, ctx: ForwardContext) -> tuple[Float[Array, "B T"], Sites]:
        """Scores of all tokens, and the sites. The first site may now hold the matmul from which its score was computed
        (`projected`), which the update of the running tokens needs again."""
        if self.router.recalls and (factors := self.scheme.projection(stream, sites[0].at)) is not None:
            with jax.named_scope("routing"):
                product = jax.lax.stop_gradient(factors[0] @ factors[1].astype(factors[0].dtype))
            sites = (sites[0]._replace(at=sites[0].at._replace(projected=product)), *sites[1:])
        own, at = sites[0].routing.router, tuple(site.at for site in sites)
        if self.config.adaptive:  # one threshold serves the whole training: score the angles as after the ramp
            at = tuple(here._replace(progress=jnp.float32(1.0)) for here in at)
        with jax.named_scope("routing"):
            if len(at) == 1:
                return self.router.score(self.scheme, stream, own, at[0], ctx.where, ctx.noise), sites
            return self.router.score_block(self.scheme, stream, own, at, ctx.where, ctx.noise), sites

    def _at(self, at: Boundary, rows: Stream, product: Float[Array, "B k C"] | None) -> Boundary:
        """The boundary for some rows, with their part of the `projected` product."""
        factors = self.scheme.projection(rows, at)
        return at if product is None or factors is None else at._replace(projected=recalled(*factors, product))

    def _lowered(self, cut: Float[Array, "*#B"], x: Float[Array, "B T D"]) -> Float[Array, "*#B"]:
        coarser = max((x.dtype, self.dtype), key=lambda dtype: float(jnp.finfo(dtype).eps))
        return lowered(cut, self.router.scale, coarser)

    def _logits(self, site: Site, x, scores) -> Float[Array, "B T"]:
        cut = self._lowered(site.cut, x)
        return self.decider.logits(site.routing.decider, self.router, x, scores, cut)

    def _by_capacity(self, stream, sites: Sites, ctx: ForwardContext, k: int) -> tuple[Result, ...]:
        """Runs the sublayers, one after the other, on the k highest-scoring tokens of each sequence. Rows are gathered
        once, by index, and put back once, so that nothing else of full length is built."""
        scheme = self.scheme
        x, (scores, sites) = scheme.read(stream), self._scores(stream, sites, ctx)
        with jax.named_scope("routing"):
            chosen = top_tokens(scores, ctx.where, k)
            moved = stream, ctx.where, [site.at.projected for site in sites]
            rows, there, products = jax.tree.map(ctx.pin, take(moved, chosen.indices))
        weights, results = take(scores, chosen.indices), []
        ran, real = is_chosen(chosen.indices, x.shape[1]), ctx.where.segments > 0
        logits = self._logits(sites[0], x, scores)
        notes = self._notes(
            ran,
            cut=chosen.cut if k < x.shape[1] else -jnp.inf,
            loss=self.decider.loss(logits, ran, real) if self.decider.trained else 0.0,
            executed=_share(ran, real),
            agreement=_share((logits >= 0) == ran, real),
        )
        for site, product in zip(sites, products, strict=True):
            picked, at = scheme.read(rows), self._at(site.at, rows, product)
            if isinstance(site.branch, Mixing):
                source, seen = (scheme.read(stream), ctx.where) if self.config.kv == "all" else (picked, there)
                done = Update(between(site.branch, picked, there, source, seen))
            else:
                done = update_by_token(site.branch, picked, there.segments > 0, ctx.lossless)
            update = self.router.weigh(ctx.pin(done.value), weights)
            with jax.named_scope("residual"):
                if len(sites) == 1:
                    after, gate = scheme.advance_rows(stream, rows, update, at, chosen.indices)
                else:
                    rows, gate = fitting_result(scheme, rows, picked.shape, scheme.advance(rows, update, at))
                    stream = scheme.skip(stream, at)
                    after = put(stream, rows, chosen.indices)  # after attention: compiled only if it is observed
            gate = scattered(mean_gate(gate, picked)[..., None].astype(jnp.float32), chosen.indices, x.shape[1])
            results.append(Result(after, None, gate, ran, notes, done.notes))
            notes = notes | {"cut": jnp.full_like(notes["cut"], -jnp.inf)}  # a block's cut is noted once
        return tuple(results)

    def _by_threshold(self, stream, sites: Sites, ctx: ForwardContext) -> tuple[Result, ...]:
        """Runs the tokens whose score reaches the one threshold, in the smallest size that holds them."""
        real, tokens = ctx.where.segments > 0, ctx.where.positions.shape[1]
        (weights, sites), x = self._scores(stream, sites, ctx), self.scheme.read(stream)
        scores = jax.lax.stop_gradient(weights)
        weights = weights if self.router.factor else scores
        reach = lambda cut: scores[..., None] >= self._lowered(cut, x)  # noqa: E731
        ran = reach(sites[0].cut[None])[..., 0] & real
        above = jnp.sum(reach(adaptive.grid(sites[0].cut)) & real[..., None], axis=1)
        fits = adaptive.sizes(tokens)
        needed = on_any_device(jnp.max(jnp.sum(ran, axis=-1), initial=0))
        index = jnp.searchsorted(jnp.asarray(fits), needed)
        operands = stream, ctx.where, ran, weights, [(site.branch, site.at) for site in sites]
        done = adaptive.switch(index, [functools.partial(self._sized, k, ctx) for k in fits], operands)
        computed = jnp.asarray(fits, jnp.float32)[index] / tokens
        notes = self._notes(ran, executed=_share(ran, real), agreement=1.0, computed=computed)
        notes["above"] = above / jnp.maximum(jnp.sum(real, axis=-1, keepdims=True), 1)
        return tuple(Result(after, None, gate, ran, notes, experts) for after, gate, experts in done)

    def _sized(self, k: int, ctx: ForwardContext, operands) -> list[tuple[Stream, Array, dict]]:
        """For each of the sublayers, run for at most k tokens of a sequence: the stream and the gate after it, and the
        notes of its branch."""
        pin = ctx.pin
        stream, where, ran, scores, parts = operands
        scheme, done = self.scheme, []
        moved, indices = (stream, where, ran, scores, [at.projected for _, at in parts]), None
        if 0 < k < ran.shape[1]:
            indices = top_tokens(ran.astype(jnp.float32), where, k).indices
            moved = jax.tree.map(pin, take(moved, indices))
        rows, there, mine, weights, products = moved
        for (branch, at), product in zip(parts, products, strict=True):
            at = self._at(at, rows, product)
            gate = _closed(ran)
            if k == 0:
                stream = scheme.skip(stream, at)
                done.append((stream, gate, _no_notes(branch, scheme.read(stream))))
                continue
            picked = scheme.read(rows)
            if isinstance(branch, Mixing):
                hidden = Where(jnp.where(mine, there.segments, HIDDEN), there.positions)
                source = (there, scheme.read(stream), where) if self.config.kv == "all" else (hidden, picked, hidden)
                update = Update(between(branch, picked, *source))
            else:
                update = update_by_token(branch, picked, mine & (there.segments > 0), ctx.lossless)
            with jax.named_scope("residual"):
                result = scheme.advance(rows, self.router.weigh(pin(update.value), weights), at)
                after, opened = fitting_result(scheme, rows, picked.shape, result)
                rows, stream = jax.tree.map(where_ran(mine), after, scheme.skip(rows, at)), scheme.skip(stream, at)
            opened = (mine * mean_gate(opened, picked))[..., None]
            gate = opened if indices is None else scattered(opened, indices, ran.shape[1])
            done.append((rows if indices is None else put(stream, rows, indices), gate, update.notes))
        return done

    def _decided(self, stream, sites: Sites, cache: Cache, ctx: ForwardContext) -> tuple[Result, ...]:
        """Runs the tokens that the causal decider lets in. A sublayer that no token of the batch enters is not run at
        all."""
        (scores, sites), results = self._scores(stream, sites, ctx), []
        ran = (self._logits(sites[0], self.scheme.read(stream), scores) >= 0) & (ctx.where.segments > 0)
        for site in sites:
            results.append(self._admitted(stream, site, cache, ctx, scores, ran))
            stream, ran, cache = results[-1].stream, results[-1].ran, results[-1].cache
        return tuple(results)

    def _admitted(self, stream, site: Site, cache: Cache, ctx: ForwardContext, scores, ran) -> Result:
        """Runs one sublayer for the tokens of `ran` for which the cache has room. Their number is data: with a cache
        they are gathered in one of a few sizes, without a cache all tokens are computed."""
        scheme, where = self.scheme, ctx.where
        real = where.segments > 0
        mixing = isinstance(site.branch, Mixing)
        if mixing:
            ran, known, seen, cache = self._known(scheme.read(stream), site, cache, where, ran)

        nothing = _no_notes(site.branch, scheme.read(stream))

        def enter(size: int):
            def run(stream):
                few = ragged.Few.of(ran, size, where)
                rows, there, mine, weights, product = few.take((stream, where, ran, scores, site.at.projected))
                picked, at = scheme.read(rows), self._at(site.at, rows, product)
                if mixing:
                    cached = isinstance(known, CachedLayer)
                    asking = Where(jnp.where(mine, there.segments, 0), there.positions) if cached else there
                    done = Update(fitting(site.branch.mix(picked, asking, *few.seen(known, seen)), picked))
                else:
                    done = update_by_token(site.branch, picked, mine, ctx.lossless)
                result = scheme.advance(rows, self.router.weigh(ctx.pin(done.value), weights), at)
                after, gate = fitting_result(scheme, rows, picked.shape, result)
                after = jax.tree.map(where_ran(mine), after, scheme.skip(rows, at))
                opened = (mine * mean_gate(gate, picked))[..., None]
                gates = few.put(_closed(ran), opened)
                notes = few.put(nothing, done.notes) if picked.shape[0] < ran.shape[0] else done.notes
                return few.put(scheme.skip(stream, site.at), after), gates, notes

            return run

        def pass_by(stream):
            return scheme.skip(stream, site.at), _closed(ran), nothing

        fits = ragged.sizes(*ran.shape, cache is not None)
        index = jnp.searchsorted(jnp.asarray((0, *fits)), ragged.needed(ran))
        after, gate, experts = jax.lax.switch(index, [pass_by, *map(enter, fits)], stream)
        notes = self._notes(ran, executed=_share(ran, real), agreement=1.0)
        return Result(after, cache, gate, ran, notes, experts)

    def _known(self, x, site: Site, cache: Cache, where: Where, ran) -> tuple[Array, Any, Where, Cache]:
        """The tokens that run given the cache's room, what they attend to and its documents and positions, and the
        cache with the new keys and values."""
        if self.config.kv == "all":
            fresh = site.branch.keys_values(x, where)
            if cache is None:
                return ran, fresh, where, None
            cache = cache.write(fresh, where)
            return ran, *cache.seen(fresh, where), cache
        if cache is None:
            ran = with_room_by_document(ran, self.room(site.rate), where)
        else:
            ran = cache.stored.room(cache.layer, ran)
        seen = Where(jnp.where(ran, where.segments, HIDDEN), where.positions)
        if cache is None:
            return ran, site.branch.keys_values(x, where), seen, None
        project = lambda x: site.branch.keys_values(x, where)  # noqa: E731
        nothing = lambda x: jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(project, x))  # noqa: E731
        fresh = jax.lax.cond(jnp.any(ran), project, nothing, x)
        cache = cache.write(fresh, where, ran)
        return ran, *cache.seen(fresh, seen), cache


def averaged(notes: dict[str, Float[Array, "S B ..."]], where: Where) -> dict[str, Float[Array, "S ..."]]:
    """The notes of a batch, averaged over its real tokens instead of its sequences. `cut` is averaged over the
    sequences that have one, -inf if none has; `cuts` is the number of these sequences."""
    real = jnp.sum(where.segments > 0, axis=-1).astype(jnp.float32)
    cut, rows = mean_cut(notes["cut"])
    real = real / jnp.maximum(jnp.sum(real), 1.0)
    mean = lambda note: jnp.einsum("sb...,b->s...", note, real, precision="highest")  # noqa: E731
    shares = {name: mean(note) for name, note in notes.items() if name != "cut"}
    return shares | {"cut": cut, "cuts": rows}


def _update(branch: Any, x: Float[Array, "B T D"], cache: Cache, ctx: ForwardContext) -> Update:
    """The update of all tokens."""
    if isinstance(branch, Choosing):
        return update_by_token(branch, x, ctx.where.segments > 0, ctx.lossless)._replace(cache=cache)
    return Update(*update_of(branch, x, ctx.where, cache))


def _closed(ran: Bool[Array, "B T"]) -> Float[Array, "B T 1"]:
    """The gate of a sublayer that no token enters, split over devices as the tokens are."""
    return jnp.zeros_like(ran, jnp.float32)[..., None]


def _no_notes(branch: Any, x: Float[Array, "B T D"]) -> dict[str, Float[Array, "B ..."]]:
    """The notes of a branch that ran for no token."""
    if not isinstance(branch, Choosing):
        return {}
    notes = jax.eval_shape(lambda x: branch.choose(x, jnp.ones(x.shape[:2], bool), lossless=True).notes, x)
    return jax.tree.map(jnp.zeros_like, notes)


def _share(what: Bool[Array, "B T"], real: Bool[Array, "B T"]) -> Float[Array, " B"]:
    return jnp.sum(what & real, axis=-1) / jnp.maximum(jnp.sum(real, axis=-1), 1)
