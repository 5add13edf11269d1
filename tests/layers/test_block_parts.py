"""The parts of a block that models made elsewhere have: biases, gains, windows, rotary on a part and stretched."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from flax import nnx
from tolerance import assert_close, close_to

from nagjax.errors import UserError
from nagjax.layers.attend import attend
from nagjax.layers.attention import Attention
from nagjax.layers.cache import CachedLayer, KVCache
from nagjax.layers.config import GATED, BlockConfig, RopeConfig
from nagjax.layers.mlp import MLPS
from nagjax.layers.parameters import Scales
from nagjax.layers.rotary import frequencies, rotary
from nagjax.layers.where import Where, causal_mask


def shaken(module):
    noise = np.random.default_rng(0)
    graph, state = nnx.split(module)
    return nnx.merge(graph, jax.tree.map(lambda x: x + 0.3 * noise.standard_normal(x.shape).astype(np.float32), state))


def test_defaults_add_no_parameters():
    names = set(nnx.to_pure_dict(nnx.state(Attention(tiny.model_config(), Scales(), nnx.Rngs(0)))))
    assert names == {"query", "key", "value", "out"}
    assert set(nnx.to_pure_dict(nnx.state(MLPS["swiglu"](8, 16, Scales(), nnx.Rngs(0))))) == {"gate", "up", "down"}


def test_biases_are_added_where_asked():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 16)), jnp.float32)
    for kind in MLPS:
        module = shaken(MLPS[kind](16, 24, Scales(), nnx.Rngs(0), True))
        up = x @ module.up[...] + module.up_bias[...]
        if kind in GATED:
            opening = {"swiglu": jax.nn.silu, "geglu": jax.nn.gelu}[kind]
            up = opening(x @ module.gate[...] + module.gate_bias[...]) * up
        else:
            up = jax.nn.relu(up) if kind == "relu" else jax.nn.gelu(up, approximate=kind == "gelu")
        assert_close(module(x), up @ module.down[...] + module.down_bias[...], terms=24, chain=2)
    config = tiny.model_config(qk_norm=False, positions="learned", block=BlockConfig(biases=("qkv", "out")))
    module, where = shaken(Attention(config, Scales(), nnx.Rngs(0))), Where.whole(2, 4)
    known = module.keys_values(x, where)
    assert_close(known.values.reshape(2, 4, -1), x @ module.value[...] + module.value_bias[...], terms=16)
    assert_close(known.keys.reshape(2, 4, -1), x @ module.key[...] + module.key_bias[...], terms=16)


@pytest.mark.parametrize("kind", ["head", "row"])
def test_gains_of_normalised_queries_and_keys(kind):
    config = tiny.model_config(positions="learned", block=BlockConfig(qk_gain=kind, qk_epsilon=0.1))
    module = shaken(Attention(config, Scales(), nnx.Rngs(0)))
    x = np.random.default_rng(0).standard_normal((1, 3, 16)).astype(np.float32)
    q = x.astype(float) @ np.asarray(module.query[...], float)
    q = q.reshape(1, 3, 2, 8) if kind == "head" else q
    q = q / np.sqrt(np.mean(q**2, -1, keepdims=True) + 0.1) * np.asarray(module.query_gain[...], float)
    got = module.queries(jnp.asarray(x), Where.whole(1, 3))
    assert_close(got, q.reshape(1, 3, 2, 8), terms=16, chain=2)


def test_rotary_on_a_part_leaves_the_rest():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 4, 2, 8)), jnp.float32)
    at = jnp.arange(4)[None]
    got = rotary(x, at, rotated=4)
    np.testing.assert_array_equal(got[..., 4:], x[..., 4:])
    assert_close(got[..., :4], rotary(x[..., :4], at), terms=2, chain=3)


def test_llama3_frequencies():
    """High frequencies stay, low ones are divided by the factor; between them the share is linear in the frequency."""
    rope = RopeConfig("llama3", factor=8.0, low=1.0, high=4.0, original=64)
    plain = np.asarray(frequencies(16, 1e4), float)
    got, turns = np.asarray(frequencies(16, 1e4, rope), float), 64 * plain / (2 * np.pi)
    for f, g, n in zip(plain, got, turns, strict=True):
        share = 1.0 if n > 4 else 0.0 if n < 1 else (n - 1) / 3
        assert g == close_to(share * f + (1 - share) * f / 8, terms=1, chain=4)
    assert np.any(turns > 4) and np.any(turns < 1) and np.any((turns > 1) & (turns < 4))
    assert_close(frequencies(16, 1e4, RopeConfig("linear", 2.0)), plain / 2, terms=1, chain=2)


def test_a_window_hides_what_is_further_back_with_a_cache_too():
    where = Where.whole(1, 6)
    seen = np.asarray(causal_mask(where, where, 3))[0, 0]
    assert [list(np.flatnonzero(row)) for row in seen] == [[0], [0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5]]
    config = tiny.model_config(block=BlockConfig(window=3))
    module = Attention(config, Scales(), nnx.Rngs(0))
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 6, 16)), jnp.float32)
    full, _ = module(x, where)
    cache = CachedLayer(KVCache.empty(1, 1, 6, config.kv_heads, config.head_width, jnp.float32), jnp.int32(0))
    _, cache = module(x[:, :5], Where.whole(1, 5), cache)
    last, _ = module(x[:, 5:], Where(jnp.ones((1, 1), int), jnp.full((1, 1), 5)), cache)
    assert_close(last, full[:, 5:], terms=16, chain=4)
    changed, _ = module(x.at[:, 2].add(1.0), where)
    np.testing.assert_array_equal(changed[:, 5], full[:, 5])
    assert np.abs(changed[:, 4] - full[:, 4]).max() > 1e-4
    with pytest.raises(UserError, match="splash.*window"):
        attend(x[..., None], x[..., None], x[..., None], where, where, "splash", 3)


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"window": 0}, "block.window"),
        ({"rotated": 0.0}, "block.rotated"),
        ({"biases": ("all",)}, "block.biases"),
        ({"qk_epsilon": 0.0}, "block.qk_epsilon"),
    ],
    ids=["window", "rotated", "biases", "epsilon"],
)
def test_bad_parts_are_refused_by_name(values, named):
    with pytest.raises(UserError, match=named):
        BlockConfig(**values)


def test_parts_that_do_not_go_together_are_refused():
    with pytest.raises(UserError, match="qk_gain.*qk_norm"):
        tiny.model_config(qk_norm=False, block=BlockConfig(qk_gain="head"))
    with pytest.raises(UserError, match="even head width, not 1"):
        tiny.model_config(block=BlockConfig(rotated=0.2))
    with pytest.raises(UserError, match="rope.low"):
        RopeConfig("llama3", low=4.0, high=1.0)
    assert tiny.model_config(heads=3, kv_heads=3, block=BlockConfig(head_width=6)).head_width == 6
