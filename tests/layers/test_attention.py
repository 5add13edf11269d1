"""The attention branch against a loop in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.errors import UserError
from nagjax.layers.attend import attend
from nagjax.layers.attention import Attention, Where
from nagjax.layers.cache import CachedLayer, KVCache, attend_cached
from nagjax.layers.parameters import Scales
from nagjax.layers.platform import tracing_for
from nagjax.layers.rotary import rotary
from tests import tiny
from tests.tolerance import assert_close, close_to


def rotated(x, position, base=10_000.0):
    """One head's features, halves paired, at one position."""
    half = len(x) // 2
    out = np.empty_like(x)
    for i in range(half):
        angle = position * base ** (-i / half)
        out[i] = x[i] * np.cos(angle) - x[half + i] * np.sin(angle)
        out[half + i] = x[half + i] * np.cos(angle) + x[i] * np.sin(angle)
    return out


def attention(module, config, x, segments, positions):
    """Token by token, head by head."""
    weights = {name: np.asarray(getattr(module, name)[...], float) for name in ("query", "key", "value", "out")}
    width, group = config.head_width, config.heads // config.kv_heads
    out = np.zeros_like(x)
    for b in range(x.shape[0]):

        def heads(name, row, b=b):
            parts = (x[b, row] @ weights[name]).reshape(-1, width)
            if name != "value":
                if config.qk_norm:
                    parts = parts / np.sqrt(np.mean(parts**2, -1, keepdims=True) + 1e-6)
                if config.positions == "rotary":
                    parts = np.stack([rotated(p, positions[b, row]) for p in parts])
            return parts

        for t in range(x.shape[1]):
            reach = t + 1 if config.causal else x.shape[1]
            seen = [j for j in range(reach) if segments[b, j] == segments[b, t]]
            q, mixed = heads("query", t), []
            for h in range(config.heads):
                scores = np.array([q[h] @ heads("key", j)[h // group] for j in seen]) / np.sqrt(width)
                p = np.exp(scores - scores.max())
                mixed.append((p / p.sum()) @ np.stack([heads("value", j)[h // group] for j in seen]))
            out[b, t] = np.concatenate(mixed) @ weights["out"]
    return out


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"qk_norm": False, "heads": 4, "kv_heads": 4},
        {"positions": "learned", "heads": 4, "kv_heads": 2},
        {"causal": False},
        {"causal": False, "attention": "xla"},
    ],
    ids=["qk_norm", "all_heads", "no_rotary", "bidirectional", "bidirectional_xla"],
)
def test_grouped_queries_in_packed_documents(changes):
    config = tiny.model_config(**changes)
    module = Attention(config, Scales(), nnx.Rngs(0))
    batch = tiny.packed_batch(seed=1, batch=2)
    x = np.random.default_rng(0).standard_normal((2, tiny.TOKENS, config.width)).astype(np.float32)
    got, cache = module(jnp.asarray(x), Where(batch.segment_ids, batch.positions))
    want = attention(module, config, x.astype(float), batch.segment_ids, batch.positions)
    assert cache is None
    assert_close(got, want, terms=16, chain=4)


def test_unreached_cache_slots_are_masked_whatever_they_hold():
    config = tiny.model_config()
    module = Attention(config, Scales(), nnx.Rngs(0))
    x = np.random.default_rng(0).standard_normal((1, 4, config.width)).astype(np.float32)
    full, _ = module(jnp.asarray(x), Where.whole(1, 4))
    junk = jnp.full((3, 1, config.kv_heads, 9, config.head_width), 7.0)
    got, cache = module(jnp.asarray(x), Where.whole(1, 4), CachedLayer(KVCache(junk, junk), jnp.int32(1)))
    assert_close(got, full, terms=16, chain=4)
    changed = np.argwhere(np.asarray(cache.stored.keys != junk))
    assert {*changed[:, 0]} == {1} and {*changed[:, 3]} == {0, 1, 2, 3}


def test_rotary_is_relative():
    rng = np.random.default_rng(0)
    q, k = rng.standard_normal((2, 1, 1, 1, 8)).astype(np.float32)

    def score(i, j):
        a, b = (rotary(jnp.asarray(x), jnp.array([[p]])) for x, p in ((q, i), (k, j)))
        return float(jnp.sum(a * b))

    assert score(9, 4) == close_to(score(105, 100), terms=8, chain=2, scale=105.0)
    assert abs(score(9, 4) - score(9, 5)) > 1e-3
    np.testing.assert_array_equal(rotary(jnp.asarray(q), jnp.array([[0]])), q)
    assert_close(rotary(jnp.asarray(q), jnp.array([[3]]))[0, 0, 0], rotated(q[0, 0, 0], 3), terms=2, chain=3)


def test_a_forced_backend_that_cannot_says_why():
    q, where = jnp.zeros((1, 6, 2, 8)), Where.whole(1, 6)
    with pytest.raises(UserError, match="splash.*128"):
        attend(q, q, q, where, where, "splash")
    with pytest.raises(UserError, match="splash.*bidirectional"):
        attend(q, q, q, where, where, "splash", causal=False)
    with pytest.raises(UserError, match="cudnn.*float32 on a cpu"):
        attend(q, q, q, where, where, "cudnn")
    with tracing_for("gpu"), pytest.raises(UserError, match="cudnn.*float32 on a gpu"):
        attend(q, q, q, where, where, "cudnn")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_attention_to_a_cache_is_products_of_matrices_by_head(dtype):
    """XLA:CPU has no library for other orders of the dimensions, and works through them element by element."""
    stored = KVCache.empty(2, 3, 8, 2, 4, dtype)
    q, where = jnp.zeros((3, 5, 4, 4), dtype), Where.whole(3, 5)
    program = jax.make_jaxpr(lambda q: attend_cached(q, CachedLayer(stored, jnp.int32(1)), where))(q)
    found = [e for e in program.jaxpr.eqns if e.primitive.name == "dot_general"]
    assert len(found) == 2
    for one in found:
        (_, _), batch = one.params["dimension_numbers"]
        assert batch == ((0, 1), (0, 1)) and one.invars[1].aval.shape == (3, 2, 8, 4)
