"""The Transformer. Its code is the same for every residual scheme."""

import math
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Array, Float, Int, UInt32

from nagjax.errors import UserError
from nagjax.layers.attention import Attention
from nagjax.layers.branch import Update, narrowed, update_by_token
from nagjax.layers.cache import CachedLayer, KVCache
from nagjax.layers.compressed import CompressedAttention, CompressedCache
from nagjax.layers.embedding import Embedding, Head, head_std, unembed
from nagjax.layers.experts import Experts
from nagjax.layers.int8 import Quantized
from nagjax.layers.lora import adapted, adapters
from nagjax.layers.mlp import MLP
from nagjax.layers.parameters import Scales, restart
from nagjax.layers.where import Where
from nagjax.mod.cache import SelectedCache
from nagjax.mod.config import Group
from nagjax.mod.cuts import every_cut
from nagjax.mod.routed import Cache, ForwardContext, MoD, Site, averaged
from nagjax.model.config import ModelConfig
from nagjax.model.head_transform import HeadTransform
from nagjax.model.parametrization import Parametrization
from nagjax.model.tokens import check_slots, checked
from nagjax.parameters import STACKED, check_rngs, label
from nagjax.residual import Boundary, Scheme, Stream
from nagjax.residual.arguments import share_done
from nagjax.residual.module import Residual, as_scheme
from nagjax.residual.protocol import SublayerIndex, telemetry, turn_angle
from nagjax.residual.sublayer import Result, following, run
from pallas_kernels.dispatch import preferred, using

POLICIES = {
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "offload": jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[],
        names_which_can_be_offloaded=["stream"],
        offload_src="device",
        offload_dst="pinned_host",
    ),
}


class Output(NamedTuple):
    """Result of a forward pass; `hidden` and `log_scale` are what the head reads.

    telemetry: per sublayer, arrays [S], if asked for. routing: what Mixture-of-Depths did, arrays [S, ...] (see
    `nagjax.mod.routed`); None in a model without routing. Neither counts padding. paths: per sublayer and token, [S, B,
    T], if asked for: `ran`, and `turn`, the angle in radians by which the sublayer rotated the token's residual. seen:
    what an intervention gathered, leaves [L, ...]. experts: the notes of the experts' routers, sums over the batch's
    real tokens, [L, ...] (see `nagjax.layers.experts`); None in a model without experts.
    """

    hidden: Float[Array, "B T D"]
    log_scale: Float[Array, "B T"]
    cache: tuple | None
    telemetry: dict[str, Float[Array, " S"]] | None
    routing: dict[str, Float[Array, "S ..."]] | None = None
    paths: dict[str, Array] | None = None
    seen: Any = None
    experts: dict[str, Float[Array, "L ..."]] | None = None


class Sublayer(nnx.Module):
    """A branch with the scheme's parameters before and after it, the parameters of its Mixture-of-Depths router, and
    its adapters."""

    def __init__(
        self,
        kind: Literal["attention", "mlp"],
        branch,
        mod: MoD,
        config: ModelConfig,
        sublayer: SublayerIndex,
        rngs: nnx.Rngs,
    ):
        width = config.width
        self.branch = branch
        self.entry = mod.scheme.entry(width, rngs)
        self.gate = mod.scheme.gate(width, sublayer, rngs)
        self.routing = mod.parameters(kind, width, rngs)
        self.lora = adapters(kind, branch, config.lora, rngs)


class Block(nnx.Module):
    """Attention, then MLP. `index` (0-based, may be traced) only affects initial values."""

    def __init__(self, config: ModelConfig, mod: MoD, index: Int[Array, ""], rngs: nnx.Rngs):
        scheme, total = mod.scheme, config.sublayers_before
        first, second = SublayerIndex(2 * index + 1, total), SublayerIndex(2 * index + 2, total)
        scales = lambda sublayer: Scales(scheme.output_scale(sublayer), scheme.inner_scale(sublayer))  # noqa: E731
        if config.moe.experts:
            mlp = Experts(config.width, config.moe, config.mlp, scales(second), rngs)
        else:
            biases = "mlp" in config.block.biases
            mlp = MLP(config.mlp, config.width, config.hidden or 0, scales(second), rngs, biases)
        attention = (CompressedAttention if config.block.cca else Attention)(config, scales(first), rngs)
        _restart(config, scheme, attention, mlp)
        self.attention = Sublayer("attention", attention, mod, config, first, rngs)
        self.mlp = Sublayer("mlp", mlp, mod, config, second, rngs)


class Layer(NamedTuple):
    """One step of the scan over depth: a block, and the `entry` of the reader after it; for each sublayer its 1-based
    number (`index`: before pruning), that of the next reader (`following`; 0: the head) and its routing threshold
    (`cuts`); and the block's 0-based place in the model."""

    block: Block
    entry: nnx.Module
    index: Int[Array, " 2"]
    following: Int[Array, " 2"]
    cuts: Float[Array, " 2"]
    block_index: Int[Array, ""]


class BlockCall(NamedTuple):
    """The arguments of one block, as an intervention gets them: `model.sublayers(stream, *call)` runs the block."""

    layer: Layer
    ctx: ForwardContext
    rates: tuple[float, float]


Intervention = Callable[["Transformer", Stream, BlockCall], tuple[Stream, Any]]


class Observe(NamedTuple):
    """What a forward pass measures besides its result."""

    telemetry: bool = False  # per sublayer
    paths: bool = False  # per sublayer and token
    intervene: Intervention | None = None


NOTHING = Observe()


class Transformer(nnx.Module):
    """Transformer, a decoder or an encoder, with any residual scheme. Blocks are stacked, with parameters [L, ...], and
    run by scans: one for each stretch of depth in which the rates of Mixture-of-Depths repeat (one without it). scheme:
    a name, a scheme with options (`nagjax.NAG.Scheme(directions=16)`) or a class (`nagjax.NAG`)."""

    def __init__(self, config: ModelConfig, scheme: str | Scheme | type[Scheme] | type[Residual], rngs: nnx.Rngs):
        scheme = as_scheme(scheme)
        check_rngs(rngs)
        self.config, self.scheme = config, scheme
        config.moe.check_scheme(scheme.name, scheme.scale_free)
        self.mod = MoD.of(scheme, config.mod, config.context, config.compute_dtype)
        self.groups = config.mod.groups(config.depth)
        own = Parametrization.of(config, scheme)
        first = head_std(config.width)
        std = config.init_std or (first if config.tied else scheme.embedding_std(config.width))
        self.embedding = Embedding(config, std, rngs)
        make = nnx.vmap(lambda index, rngs: Block(config, self.mod, index, rngs), transform_metadata=STACKED)
        self.blocks = make(jnp.asarray(config.places), rngs.split(config.depth))
        self.entry = scheme.entry(config.width, rngs)
        # A scheme that starts a gain from it normalises the head's rows; the gain takes over their factor own.root.
        opening = math.sqrt(self.embedding.tables) * std / own.root
        self.ends = scheme.ends_for(scheme.ends(config.width, opening, rngs), config.sublayers_before)
        first = first if config.init_std is None else own.root * config.init_std
        self.head = None if config.tied else Head(config, own.root * first, rngs)
        self.transform = None if config.head_epsilon is None else HeadTransform(config, rngs)
        if self.transform is not None:
            _restart(config, scheme, self.transform)
        label(self)

    def __repr__(self) -> str:
        count = sum(leaf.size for leaf in jax.tree.leaves(nnx.state(self, nnx.Param)))
        size = f"{self.config.depth} blocks x {self.config.width}, {count:,} parameters"
        return f"Transformer({self.scheme.title}, {size}; nnx.display browses them)"

    def layers(self, cuts: Float[Array, " S"] | None = None) -> Layer:
        """The layers over which the scans run, stacked along depth."""
        shifted = following(self.blocks.attention.entry, self.entry)
        index = jnp.asarray(self.config.indices, jnp.int32)
        readers = jnp.concatenate([index[1:], jnp.zeros((1,), jnp.int32)])
        cuts = every_cut(cuts, self.config.sublayers)
        pairs = (x.reshape(-1, 2) for x in (index, readers, cuts))
        return Layer(self.blocks, shifted, *pairs, jnp.arange(self.config.depth, dtype=jnp.int32))

    def boundary(self, gate: nnx.Module | None, entry: nnx.Module, index, following, progress) -> Boundary:
        """This model's boundary at which an update is committed; `gate` None and `index` 0 open a stream."""
        places = jnp.asarray(index, jnp.int32), jnp.asarray(following, jnp.int32)
        return Boundary(gate, entry, *places, progress, self.config.sublayers_before)

    def sublayers(
        self,
        stream: Stream,
        layer: Layer,
        ctx: ForwardContext,
        rates: tuple[float, float] = (0.0, 0.0),
        cache: Cache = None,
    ) -> tuple[Result, Result]:
        """Runs one block. Returns the results of its attention and of its MLP."""
        attention, mlp = layer.block.attention, layer.block.mlp
        dtypes = self.config.compute_dtype, self.config.stream_dtype
        own = lambda part, branch: narrowed(adapted(branch, part.lora, self.config.lora), *dtypes)  # noqa: E731
        attend = own(attention, attention.branch.of_block(layer.index[0] // 2))
        feed = own(mlp, mlp.branch)

        def site(i: int, own: Sublayer, branch: Any, entry: nnx.Module) -> Site:
            at = self.boundary(own.gate, entry, layer.index[i], layer.following[i], ctx.progress)
            return Site(branch, own.routing, at, layer.cuts[i], rates[i])

        sites = site(0, attention, attend, mlp.entry), site(1, mlp, feed, layer.entry)
        if not (self.config.mod.active or any(rates)):
            with jax.named_scope("attention"):
                mix = lambda x: Update(*attend(x, ctx.where, cache))  # noqa: E731
                first = run(self.scheme, stream, mix, sites[0].at, ctx.pin)
            with jax.named_scope("mlp"):
                forward = lambda x: update_by_token(feed, x, ctx.where.segments > 0, ctx.lossless)  # noqa: E731
                return first, run(self.scheme, first.stream, forward, sites[1].at, ctx.pin)
        if self.config.mod.unit == "block":
            first, second = self.mod.run(stream, sites, cache, ctx)
            return first, second
        with jax.named_scope("attention"):
            (first,) = self.mod.run(stream, sites[:1], cache, ctx)
        with jax.named_scope("mlp"):
            (second,) = self.mod.run(first.stream, sites[1:], first.cache, ctx)
        return first, second

    def step(
        self,
        stream,
        layer: Layer,
        ctx: ForwardContext,
        *,
        rates: tuple[float, float] = (0.0, 0.0),
        cache: Cache = None,
        observe: Observe = NOTHING,
    ):
        """Runs one block. Returns the stream, the layer's new cache, and stacked notes: telemetry, routing and paths of
        its sublayers, and those of its experts."""
        first, second = self.sublayers(stream, layer, ctx, rates, cache)
        real = ctx.where.segments > 0
        both = (self._notes(stream, first, observe, real), self._notes(first.stream, second, observe, real))
        notes = jax.tree.map(lambda *pair: jnp.stack(pair), *both)
        return second.stream, first.cache, (*notes, jax.tree.map(lambda note: note[None], second.experts))

    def _notes(self, before, result: Result, observe: Observe, real) -> tuple[dict, dict, dict]:
        after = result.stream
        notes = telemetry(self.scheme, before, after, result.gate, real) if observe.telemetry else {}
        paths = {}
        if observe.paths:
            (d0, _), (d1, _) = self.scheme.lanes(before), self.scheme.lanes(after)
            paths = {"ran": result.ran, "turn": turn_angle(d0, d1)}
        return notes, result.notes, paths

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        where: Where | None = None,
        *,
        types: Int[Array, "B T"] | None = None,
        progress: float | Float[Array, ""] = 1.0,
        cache: tuple | int | None = None,
        cuts: Float[Array, " S"] | None = None,
        causal: bool = False,
        noise: int | UInt32[Array, ""] = 0,
        observed: bool = False,
        mapped: bool = False,
        intervene: Intervention | None = None,
        pin: Callable[[jax.Array], jax.Array] = lambda x: x,
    ) -> Output:
        """Maps token ids [B, T], 0 to vocab - 1, to what the head reads. With rotary positions T is free.

        `where` gives each token's document and position; by default each row is one document. `types`: the tokens'
        types in a model with `config.token_types` (BERT's sentences), by default 0. `progress` is the share of the
        training done, step / steps in your loop. `cache` makes the pass incremental; an integer begins one, of so many
        tokens; a pass that continues it needs `where`, as positions begin at 0 by default. `observed` adds telemetry
        per sublayer, `mapped` per sublayer and token. `intervene` runs each block instead of the model: it may measure
        or change the stream or skip the block, and returns the stream after the block and what it gathered. `pin` is
        applied to activations [B, T, ...] between blocks, to shard them.

        Mixture-of-Depths: `causal` chooses tokens with the causal decider instead of top-k; a pass with a cache needs
        it. `cuts` are the average cuts that a threshold compares with; `noise` varies the random router.

        Raises UserError for tokens that are not ids [B, T] of the vocabulary (traced, of a wrong shape or dtype), or
        more than the learned positions or the cache; for types, or learned positions in `where`, that the model does
        not have, for what a cache cannot hold (a row is one document, which begins at position 0 and ends where its
        slots do), and for other shapes than the tokens'; for a `progress` outside of [0, 1]; for missing or too few
        cuts where `causal` or adaptive capacity needs them; and for a cache of routed tokens without `causal`, or of a
        model that is not causal.
        """
        places, cache = (int(cache), None) if isinstance(cache, int | np.integer) else (None, cache)
        tokens, where = checked(tokens, self.config, where, types, places)
        cache = cache if places is None else self.empty_cache(len(tokens), places)
        check_slots(where, cache, begins=places is not None)
        progress = share_done(progress)
        asked = (causal or self.config.mod.adaptive) and any(map(self.config.mod.routes, ("attention", "mlp")))
        if asked and cuts is None and self.mod.decider.needs_cuts:
            fix = "there are no thresholds: give the average cuts of training, cuts=run.mod['cuts'] of an opened run"
            raise UserError("mod.decider", self.mod.decider.name, fix)
        lossless, begins = causal or cache is not None, places is not None
        ctx = ForwardContext(where, progress, jnp.asarray(noise, jnp.uint32), causal, pin, lossless, begins)
        first = jax.tree.map(lambda own: own[0], self.blocks.attention.entry)
        at = self.boundary(None, first, 0, self.config.indices[0], progress)
        with jax.named_scope("embedding"):
            stream = self.scheme.open(self.embedding(tokens, where, self.config.stream_dtype, types), at, self.ends)
        layers, observe = self.layers(cuts), Observe(observed, mapped, intervene)
        caches = cache or ((None,) * len(group.rates) for group in self.groups)
        written, notes, seen = [], [], []
        with using(preferred() if self.config.kernels == "auto" else self.config.kernels):
            for group, own in zip(self.groups, caches, strict=True):
                stream, (now, note, found) = self._scan(group, stream, layers, own, ctx, observe)
                written.append(now)
                notes.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), note))
                seen.append(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), found))
        by_sublayer, routing, paths, experts = jax.tree.map(lambda *parts: jnp.concatenate(parts), *notes)
        seen = jax.tree.map(lambda *parts: jnp.concatenate(parts), *seen)
        routing = averaged(routing, where) if routing else None
        experts = jax.tree.map(lambda note: jnp.sum(note, axis=1), experts)
        with jax.named_scope("head"):
            hidden, log_scale = self.close(stream)
        cache = tuple(written) if cache else None
        return Output(hidden, log_scale, cache, by_sublayer or None, routing, paths or None, seen, experts or None)

    def _scan(self, group: Group, stream, stacked: Layer, cache: tuple, ctx: ForwardContext, observe: Observe):
        """Runs the blocks of one group. Returns the stream, the caches, notes [repeats, pattern, 2, ...] (of experts 1
        instead of 2), and what an intervention gathered, [repeats, pattern, ...]."""
        size = len(group.rates)
        # One tree per place in the pattern: inputs that the body does not slice are not copied for the backward pass.
        places = [slice(group.start + i, group.stop, size) for i in range(size)]
        pattern = tuple(jax.tree.map(lambda x, place=place: x[place], stacked) for place in places)

        def body(carry, xs):
            (stream, caches), (blocks, layer) = carry, xs
            written, notes, seen = [], [], []
            for i, (block, rates) in enumerate(zip(blocks, group.rates, strict=True)):
                stream = jax.tree.map(lambda x: checkpoint_name(ctx.pin(x), "stream"), stream)
                own = None if layer is None else CachedLayer(caches[i], layer, begins=ctx.begins)
                now, note, found = None, ({}, {}, {}, {}), ()
                if observe.intervene is None:
                    stream, now, note = self.step(stream, block, ctx, rates=rates, cache=own, observe=observe)
                else:
                    stream, found = observe.intervene(self, stream, BlockCall(block, ctx, rates))
                written.append(None if now is None else now.stored)
                notes.append(note)
                seen.append(found)
            notes, seen = (jax.tree.map(lambda *parts: jnp.stack(parts), *gathered) for gathered in (notes, seen))
            return (stream, tuple(written)), (notes, seen)

        policy = self.config.remat
        step = body if policy == "none" else jax.checkpoint(body, policy=POLICIES[policy], prevent_cse=False)
        layers = None if cache[0] is None else jnp.arange(group.repeats)
        (stream, written), noted = jax.lax.scan(step, (stream, cache), (pattern, layers))
        return stream, (written, *noted)

    def close(self, stream: Stream) -> tuple[Float[Array, "B T D"], Float[Array, "B T"]]:
        """What the head's table reads, and the logarithm of the factor on its logits."""
        hidden, log_scale = self.scheme.close(stream, self.ends)
        hidden = hidden if self.transform is None else self.transform(hidden)
        return hidden if self.config.residual_dtype == "auto" else hidden.astype(self.config.compute_dtype), log_scale

    def head_rows(self) -> Float[Array, "V D"] | Quantized:
        """The unembedding table [V, D] as the scheme's head uses it; a quantised table is already in this form."""
        table = (self.embedding.tokens if self.head is None else self.head.tokens)[...]
        return table if isinstance(table, Quantized) else self.scheme.head_rows(table)

    def logits(self, output: Output, rows: Any = None) -> Float[Array, "B T V"]:
        """Float32 logits. rows: the result of `head_rows()`, if it is already computed."""
        rows = self.head_rows() if rows is None else rows
        logits = unembed(output.hidden, output.log_scale, rows, self.config.logit_softcap)
        return logits if self.transform is None else logits + self.transform.table_bias[...]

    def empty_cache(self, batch: int, tokens: int) -> tuple:
        """A cache for each group and each block of its pattern: keys and values [repeats, B, K, tokens, Dh] in the
        computation's dtype. If attention sees only selected tokens, there is room for as many as run in training;
        blocks without attention have none. Raises UserError for a model that is not causal."""
        self.config.check_causal("a cache of keys and values")
        config, dtype = self.config, self.config.compute_dtype

        def one(group: Group, rate: float) -> KVCache | SelectedCache | CompressedCache:
            own = config.kv_heads or 0, config.head_width, dtype
            places = tokens if rate < 1.0 else 0
            if config.block.cca:
                return CompressedCache.empty(group.repeats, batch, places, config.heads or 0, *own)
            routed = config.mod.kv == "selected" and rate > 0.0
            kind, slots = (SelectedCache, min(self.mod.room(rate), tokens)) if routed else (KVCache, places)
            return kind.empty(group.repeats, batch, slots, *own)

        return tuple(tuple(one(group, rates[0]) for rates in group.rates) for group in self.groups)


def _restart(config: ModelConfig, scheme: Scheme, *parts: nnx.Module) -> None:
    """Rescales the initial values of the parts' matrices to `init_std`, if it is set."""
    if config.init_std is not None:
        own, std = Parametrization.of(config, scheme), config.init_std
        for part in parts:
            restart(part, lambda axes: std * own.start(axes))
