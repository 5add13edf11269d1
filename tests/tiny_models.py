"""Tiny models of every scheme, with random parameters, so that no difference is hidden."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nagjax.layers.attention import Where
from nagjax.model.config import ModelConfig
from nagjax.model.transformer import Transformer


def shaken(params, seed: int = 1):
    """Every parameter moved at random: gates that start constant would hide differences."""
    random = np.random.default_rng(seed)
    return jax.tree.map(lambda p: p + 0.1 * random.standard_normal(p.shape, np.float32), params)


@functools.cache
def make_model(scheme, **changes) -> Transformer:
    """2 blocks x 32, 4 query heads on 2 key heads, float32."""
    shape = {"depth": 2, "width": 32, "heads": 4, "kv_heads": 2, "context": 48, "vocab": 61, "dtype": "float32"}
    graph, params = nnx.split(Transformer(ModelConfig(**(shape | changes)), scheme, nnx.Rngs(0)))
    return nnx.merge(graph, shaken(params))


@functools.partial(jax.jit, static_argnames="graph")
def _full_logits(params, tokens, progress, *, graph):
    model = nnx.merge(graph, params)
    lossless = bool(model.config.moe.experts)  # as experts are when sampling
    return model.logits(model(tokens, Where.whole(*tokens.shape), progress=progress, causal=lossless))


def full_logits(model: Transformer, rows: list[list[int]], progress: float = 1.0) -> list[np.ndarray]:
    """Logits [T, V] of each row, by one pass without a cache (rows are padded to 48, which changes nothing)."""
    padded = np.zeros((len(rows), 48), np.int32)
    for line, row in zip(padded, rows, strict=True):
        line[: len(row)] = row
    graph, params = nnx.split(model)
    logits = np.asarray(_full_logits(params, padded, progress, graph=graph))
    return [line[: len(row)] for line, row in zip(logits, rows, strict=True)]


@functools.partial(jax.jit, static_argnames="graph")
def _stepwise_logits(params, tokens, *, graph):
    model = nnx.merge(graph, params)
    batch, length = tokens.shape

    def step(cache, at):
        where = Where(jnp.ones((batch, 1), jnp.int32), jnp.full((batch, 1), at, jnp.int32))
        output = model(jax.lax.dynamic_slice_in_dim(tokens, at, 1, 1), where, cache=cache)
        return output.cache, model.logits(output)[:, 0]

    return jax.lax.scan(step, model.empty_cache(batch, length), jnp.arange(length))[1].swapaxes(0, 1)


def stepwise_logits(model: Transformer, rows: list[list[int]]) -> list[np.ndarray]:
    """Logits [T, V] of each of equally long rows, by a pass with the cache for every token."""
    graph, params = nnx.split(model)
    return list(np.asarray(_stepwise_logits(params, jnp.asarray(rows), graph=graph)))
