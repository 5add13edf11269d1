"""The Transformer. It never asks which residual scheme it has."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from nagjax.layers.attention import Attention, KVCache
from nagjax.layers.embedding import Embedding, Head, head_std, unembed
from nagjax.layers.mlp import GELU, SwiGLU
from nagjax.layers.where import Where
from nagjax.model.config import ModelConfig
from nagjax.residual import Boundary, Scheme
from nagjax.residual.scheme import observe
from pallas_kernels import using

POLICIES = {
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Output(NamedTuple):
    """`hidden` and `log_scale` are what the head reads; `depth` holds per-sublayer telemetry, arrays [S]."""

    hidden: Float[Array, "B T D"]
    log_scale: Float[Array, "B T"]
    cache: KVCache | None
    depth: dict[str, Float[Array, " S"]] | None


class Sublayer(nnx.Module):
    """A branch with the scheme's parameters at its two ends."""

    def __init__(self, branch, scheme: Scheme, width: int, index: Int[Array, ""], rngs: nnx.Rngs):
        self.branch = branch
        self.entry = scheme.entry(width, rngs)
        self.gate = scheme.gate(width, index, rngs)


class Block(nnx.Module):
    """Attention, then MLP. `index` (0-based, may be traced) only sets start values."""

    def __init__(self, config: ModelConfig, scheme: Scheme, index: Int[Array, ""], rngs: nnx.Rngs):
        scale = scheme.output_scale(config.sublayers)
        mlp = {"swiglu": SwiGLU, "gelu": GELU}[config.mlp](config.width, config.hidden, scale, rngs)
        attention = Attention(config, scale, rngs)
        self.attention = Sublayer(attention, scheme, config.width, 2 * index + 1, rngs)
        self.mlp = Sublayer(mlp, scheme, config.width, 2 * index + 2, rngs)


class Layer(NamedTuple):
    """One step of the scan over depth: a block, the entry of what reads after it, and where it stands."""

    block: Block
    entry: nnx.Module
    index: Int[Array, " 2"]
    following: Int[Array, " 2"]
    cache: KVCache | None


class Transformer(nnx.Module):
    """Decoder-only Transformer over any residual scheme. Blocks are stacked: parameters [L, ...], run by a scan."""

    def __init__(self, config: ModelConfig, scheme: Scheme, rngs: nnx.Rngs):
        self.config, self.scheme = config, scheme
        std = head_std(config.width) if config.tied else scheme.embedding_std(config.width)
        self.embedding = Embedding(config, std, rngs)
        make = nnx.vmap(lambda index, rngs: Block(config, scheme, index, rngs))
        self.blocks = make(jnp.arange(config.depth), rngs.split(config.depth))
        self.entry = scheme.entry(config.width, rngs)
        self.ends = scheme.ends(config.width, std, rngs)
        self.head = None if config.tied else Head(config, rngs)

    def layers(self, cache: KVCache | None = None) -> Layer:
        """What the scan runs over, stacked along depth."""
        shifted = jax.tree.map(
            lambda own, last: jnp.concatenate([own[1:], last[None]]), self.blocks.attention.entry, self.entry
        )
        index = jnp.arange(1, self.config.sublayers + 1, dtype=jnp.int32)
        following = jnp.concatenate([index[1:], jnp.zeros((1,), jnp.int32)])
        return Layer(self.blocks, shifted, index.reshape(-1, 2), following.reshape(-1, 2), cache)

    def step(self, stream, layer: Layer, where: Where, progress, observed: bool = False):
        """One block: the stream, the layer's new cache, and telemetry of its two sublayers (arrays [2])."""
        attention, mlp = layer.block.attention, layer.block.mlp
        update, cache = attention.branch(self.scheme.read(stream), where, layer.cache)
        at = Boundary(attention.gate, mlp.entry, layer.index[0], layer.following[0], progress)
        middle, attention_gate = self.scheme.advance(stream, update, at)

        update = mlp.branch(self.scheme.read(middle))
        at = Boundary(mlp.gate, layer.entry, layer.index[1], layer.following[1], progress)
        after, mlp_gate = self.scheme.advance(middle, update, at)
        if not observed:
            return after, cache, None
        notes = (
            observe(self.scheme, stream, middle, attention_gate),
            observe(self.scheme, middle, after, mlp_gate),
        )
        return after, cache, jax.tree.map(lambda *pair: jnp.stack(pair), *notes)

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        where: Where,
        *,
        progress: float | Float[Array, ""] = 1.0,
        cache: KVCache | None = None,
        observed: bool = False,
        pin: Callable[[jax.Array], jax.Array] = lambda x: x,
    ) -> Output:
        """Tokens [B, T] to what the head reads.

        `where` says which document and position each token is at; `progress` is the share of the training done;
        `cache` (leaves [L, B, S, K, Dh]) makes the pass incremental; `observed` adds telemetry by sublayer;
        `pin` is applied to activations [B, T, ...] between blocks (the trainer pins their sharding with it).
        """
        progress = jnp.asarray(progress, jnp.float32)
        layers = self.layers(cache)
        first = jax.tree.map(lambda own: own[0], self.blocks.attention.entry)
        at = Boundary(None, first, jnp.int32(0), jnp.int32(1), progress)
        stream = self.scheme.open(self.embedding(tokens, where, self.config.compute_dtype), at, self.ends)

        def body(stream, layer):
            stream, cache, notes = self.step(jax.tree.map(pin, stream), layer, where, progress, observed)
            return stream, (cache, notes)

        if self.config.remat != "none":
            body = jax.checkpoint(body, policy=POLICIES[self.config.remat], prevent_cse=False)
        with using(None if self.config.kernels == "auto" else self.config.kernels):
            stream, (cache, notes) = jax.lax.scan(body, stream, layers)
        depth = None
        if observed:
            depth = jax.tree.map(lambda note: note.reshape(-1), notes)
        hidden, log_scale = self.scheme.close(stream, self.ends)
        return Output(hidden, log_scale, cache, depth)

    def head_rows(self) -> Float[Array, "V D"]:
        """The unembedding table as the scheme's head uses it."""
        table = self.embedding.tokens if self.head is None else self.head.tokens
        return self.scheme.head_rows(table[...])

    def logits(self, output: Output) -> Float[Array, "B T V"]:
        """Float32 logits."""
        return unembed(output.hidden, output.log_scale, self.head_rows())

    def empty_cache(self, batch: int, tokens: int) -> KVCache:
        """Zeros, leaves [L, B, tokens, K, Dh] in the computation's dtype."""
        shape = (self.config.depth, batch, tokens, self.config.kv_heads, self.config.head_width)
        return KVCache(jnp.zeros(shape, self.config.compute_dtype), jnp.zeros(shape, self.config.compute_dtype))
