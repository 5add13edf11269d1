"""Small routed models with random parameters, and the same sublayers written without gathering rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nagjax.layers.where import Where
from nagjax.mod import ModConfig, kept
from nagjax.model.transformer import Transformer
from nagjax.residual import Boundary
from tests import tiny

HIDDEN = -1


@functools.cache
def make(scheme, mod: ModConfig, **changes) -> Transformer:
    """3 blocks x 16, context 8."""
    graph, params = nnx.split(Transformer(tiny.model_config(mod=mod, **changes), scheme, nnx.Rngs(0)))
    return nnx.merge(graph, tiny.moved(params, 0.3))


def run(model: Transformer, batch=None, **options):
    """The output of a batch, `tiny.packed_batch()` unless given, and its logits."""
    return _packed(model, **options) if batch is None else _run(model, batch, **options)


@functools.cache
def _packed(model: Transformer, **options):
    return _run(model, tiny.packed_batch(), **options)


def _run(model: Transformer, batch, **options):
    graph, params = nnx.split(model)

    @jax.jit
    def forward(params):
        model = nnx.merge(graph, params)
        output = model(batch.tokens, batch.where, **options)
        return output, model.logits(output)

    return forward(params)


def masked_reference(model: Transformer, batch, chosen):
    """Logits, and scores [S, B, T], by sublayers that compute every token and then keep those of `chosen`."""
    config, scheme, mod = model.config, model.scheme, model.mod
    rates = [r for pair in config.mod.rates(config.depth) for r in pair]
    blocks = [jax.tree.map(lambda x, i=i: x[i], model.blocks) for i in range(config.depth)]
    parts = [part for block in blocks for part in (block.attention, block.mlp)]
    entries = [part.entry for part in parts] + [model.entry]
    at = lambda gate, i, entry, following: Boundary(  # noqa: E731
        gate, entry, jnp.int32(i), jnp.int32(following), jnp.float32(1.0), config.sublayers_before
    )
    where, all_scores = Where(*map(jnp.asarray, batch.where)), []
    stream = scheme.open(model.embedding(batch.tokens, where, jnp.float32), at(None, 0, entries[0], 1), model.ends)
    for i, (part, rate) in enumerate(zip(parts, rates, strict=True)):
        here = at(part.gate, i + 1, entries[i + 1], i + 2 if i + 1 < len(parts) else 0)
        k, x = kept(rate, config.context), scheme.read(stream)
        own = part.routing.router if 0 < k < config.context and (config.mod.unit == "sublayer" or i % 2 == 0) else None
        if own is not None and config.mod.unit == "block":
            following = Boundary(
                parts[i + 1].gate,
                entries[i + 2],
                jnp.int32(i + 2),
                jnp.int32(i + 3 if i + 2 < len(parts) else 0),
                jnp.float32(1.0),
                config.sublayers_before,
            )
            scores = mod.router.score_block(scheme, stream, own, (here, following), where, jnp.uint32(0))
        elif own is not None:
            scores = mod.router.score(scheme, stream, own, here, where, jnp.uint32(0))
        elif 0 < k < config.context:
            scores = all_scores[-1]  # of the block that it belongs to
        else:
            scores = jnp.ones(x.shape[:2])
        mask = chosen[i]
        all_scores.append(scores)
        if i % 2 == 0:
            hidden = mask if config.mod.kv == "selected" else np.ones_like(mask)
            seen = Where(jnp.where(hidden, where.segments, HIDDEN), where.positions)
            update = part.branch.mix(x, where, part.branch.keys_values(x, where), seen)
        else:
            update = part.branch(x)
        if 0 < k < config.context:
            update = mod.router.weigh(update, scores)
        after, _ = scheme.advance(stream, update, here)
        keep = lambda new, old, m=mask: jnp.where(m.reshape(*m.shape, *(1,) * (new.ndim - 2)), new, old)  # noqa: E731
        stream = jax.tree.map(keep, after, scheme.skip(stream, here))
    hidden, log_scale = scheme.close(stream, model.ends)
    logits = jnp.exp(log_scale)[..., None] * (hidden @ model.head_rows().T)
    return np.asarray(logits), np.stack(all_scores)
