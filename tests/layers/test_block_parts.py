"""The parts of a block that models made elsewhere have: biases, gains, windows, rotary on a part and stretched."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.errors import UserError
from nagjax.layers.attend import attend
from nagjax.layers.attention import Attention
from nagjax.layers.cache import CachedLayer, KVCache
from nagjax.layers.config import GATED, BlockConfig, OtherBlocks, RopeConfig
from nagjax.layers.mlp import ACTIVATIONS, MLP
from nagjax.layers.parameters import Scales
from nagjax.layers.rotary import frequencies, rotary
from nagjax.layers.where import Where, seen_mask
from nagjax.residual import find_scheme
from tests import tiny
from tests.meshes import check_losses
from tests.tolerance import assert_close, close_to


def shaken(module):
    noise = np.random.default_rng(0)
    graph, state = nnx.split(module)
    return nnx.merge(graph, jax.tree.map(lambda x: x + 0.3 * noise.standard_normal(x.shape).astype(np.float32), state))


def test_defaults_add_no_parameters():
    names = set(nnx.to_pure_dict(nnx.state(Attention(tiny.model_config(), Scales(), nnx.Rngs(0)))))
    assert names == {"query", "key", "value", "out"}
    assert set(nnx.to_pure_dict(nnx.state(MLP("swiglu", 8, 16, Scales(), nnx.Rngs(0))))) == {"gate", "up", "down"}


def test_biases_are_added_where_asked():
    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, 4, 16)), jnp.float32)
    for kind in ACTIVATIONS:
        module = shaken(MLP(kind, 16, 24, Scales(), nnx.Rngs(0), True))
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


def test_yarn_frequencies():
    """Pairs that turn often over the original context stay, those that turn seldom are divided by the factor; the share
    falls linearly with the pair's number, from the last whole one above to the first whole one below."""
    rope = RopeConfig("yarn", factor=4.0, low=1.0, high=8.0, original=256, attention=1.25)
    plain, got = np.asarray(frequencies(16, 1e4), float), np.asarray(frequencies(16, 1e4, rope), float)
    turns = 256 * plain / (2 * np.pi)
    first, last = np.flatnonzero(turns >= 8)[-1], np.flatnonzero(turns <= 1)[0]
    share = 1.0 - np.clip((np.arange(16) - first) / (last - first), 0.0, 1.0)
    assert 0 < first < last - 1 < 15
    assert_close(got, share * plain + (1.0 - share) * plain / 4.0, terms=1, chain=4)
    x, at = jnp.ones((1, 3, 1, 32)), jnp.arange(3)[None]
    norms = lambda y: np.linalg.norm(np.asarray(y, float), axis=-1)  # noqa: E731
    assert_close(norms(rotary(x, at, 1e4, rope)), 1.25 * norms(x), terms=32)


def test_attention_limits_its_logits():
    config = tiny.model_config(qk_norm=False, positions="learned", block=BlockConfig(softcap=0.5, window=3))
    module, where = shaken(Attention(config, Scales(), nnx.Rngs(0))), Where.whole(1, 6)
    x = np.random.default_rng(0).standard_normal((1, 6, 16)).astype(np.float32)
    q, known = np.asarray(module.queries(jnp.asarray(x), where), float), module.keys_values(jnp.asarray(x), where)
    k, v = (np.repeat(np.asarray(y, float), q.shape[2] // config.kv_heads, 2) for y in known)
    scores = 0.5 * np.tanh(np.einsum("bthd,bshd->bhts", q, k) * config.head_width**-0.5 / 0.5)
    shares = np.where(np.asarray(seen_mask(where, where, 3)), np.exp(scores), 0.0)
    mixed = np.einsum("bhts,bshd->bthd", shares / shares.sum(-1, keepdims=True), v).reshape(1, 6, -1)
    want = mixed @ np.asarray(module.out[...], float)
    assert_close(module(jnp.asarray(x), where)[0], want, terms=16, chain=4)
    with pytest.raises(UserError, match="cudnn.*softcap"):
        attend(jnp.asarray(q), *known, where, where, "cudnn", None, 0.5)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_other_blocks_see_and_turn_as_they_are_told(qk_norm):
    """Each block is attention whose config says for all blocks what is said for it."""
    base = BlockConfig(window=3, others=OtherBlocks((1, 4), None, "own", 50.0, RopeConfig("linear", 2.0)))
    without = dataclasses.replace(base, others=OtherBlocks((1, 4), 5, "none"))
    where, x = Where.whole(1, 7), jnp.asarray(np.random.default_rng(0).standard_normal((1, 7, 16)), jnp.float32)
    alone = [(BlockConfig(window=3), "rotary", 1e4)] * 2
    alone += [(BlockConfig(rope=RopeConfig("linear", 2.0)), "rotary", 50.0), (BlockConfig(window=5), "learned", 1e4)]
    for block, place, (own, positions, rope_base) in zip([base, without] * 2, [0, 3, 4, 1], alone, strict=True):
        config = tiny.model_config(depth=5, qk_norm=qk_norm, block=block)
        module = Attention(config, Scales(), nnx.Rngs(0))
        one = tiny.model_config(depth=5, qk_norm=qk_norm, block=own, positions=positions, rope_base=rope_base)
        want, _ = nnx.merge(nnx.split(Attention(one, Scales(), nnx.Rngs(0)))[0], nnx.state(module))(x, where)
        got = jax.jit(lambda place, module=module: module.of_block(place)(x, where)[0])(jnp.int32(place))
        assert_close(got, want, terms=16, chain=4)


def test_a_window_hides_what_is_further_back_with_a_cache_too():
    where = Where.whole(1, 6)
    seen = np.asarray(seen_mask(where, where, 3))[0, 0]
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


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"window": 0}, "block.window"),
        ({"rotated": 0.0}, "block.rotated"),
        ({"biases": ("all",)}, "block.biases"),
        ({"qk_epsilon": 0.0}, "block.qk_epsilon"),
        ({"softcap": 0.0}, "block.softcap"),
    ],
    ids=["window", "rotated", "biases", "epsilon", "softcap"],
)
def test_bad_parts_are_refused_by_name(values, named):
    with pytest.raises(UserError, match=named):
        BlockConfig(**values)


def test_parts_that_do_not_go_together_are_refused():
    with pytest.raises(UserError, match="qk_gain.*qk_norm"):
        tiny.model_config(qk_norm=False, block=BlockConfig(qk_gain="head"))
    with pytest.raises(UserError, match="block.rotated = 0.2: .*even head width, not 1"):
        tiny.model_config(block=BlockConfig(rotated=0.2))
    with pytest.raises(UserError, match="block.head_width = 5: .*even head width, not 5"):
        tiny.model_config(block=BlockConfig(head_width=5))
    with pytest.raises(UserError, match="block.others.rope.divisors = .*needs 4"):
        own = RopeConfig("longrope", divisors=(2.0,))
        tiny.model_config(block=BlockConfig(others=OtherBlocks((1,), rotary="own", rope=own)))
    with pytest.raises(UserError, match="others.places.*below 3"):
        tiny.model_config(depth=3, block=BlockConfig(others=OtherBlocks((1, 3))))
    with pytest.raises(UserError, match="others.places.*ascending"):
        OtherBlocks((2, 1))
    with pytest.raises(UserError, match="rope.low"):
        RopeConfig("llama3", low=4.0, high=1.0)
    assert tiny.model_config(heads=3, kv_heads=3, block=BlockConfig(head_width=6)).head_width == 6


def test_blocks_of_other_windows_have_the_same_losses_on_a_mesh():
    others = OtherBlocks((1,), None, "own", 500.0, RopeConfig("linear", 2.0))
    config = tiny.run_config(find_scheme("nag")(), depth=2, kv_heads=2, block=BlockConfig(window=3, others=others))
    check_losses(config, dict(data=1, fsdp=2, tensor=2, sequence=2))
