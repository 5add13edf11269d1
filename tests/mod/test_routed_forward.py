"""Running some of the tokens is running all of them and keeping some: for every scheme, router and kind of cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.layers.where import Where
from nagjax.mod import ModConfig, kept
from nagjax.residual.registry import find_scheme, schemes
from tests import tiny
from tests.mod.routing_models import make, masked_reference, run
from tests.streams import one_per_stream
from tests.tolerance import assert_close

SOME = {
    "half": ModConfig(rate=(0.5,)),
    "selected keys": ModConfig(rate=(0.5,), kv="selected"),
    "every other block, random": ModConfig(rate=(0.25,), every=2, router="random"),
    "stages, one kind removed": ModConfig(rate=(0.0, 0.5, 0.75), mlp_rate=(0.25, 1.0)),
    "skip class": ModConfig(rate=(0.5,), router="skip_class"),
    "skip class, whole blocks": ModConfig(rate=(0.5,), router="skip_class", unit="block", kv="selected"),
    "attention only": ModConfig(rate=(0.6,), skip="attention", kv="selected"),
    "whole blocks": ModConfig(rate=(0.0, 0.5, 0.75), unit="block"),
    "whole blocks, selected keys": ModConfig(rate=(0.5,), unit="block", kv="selected", every=2),
}


# Caches and routers are the same for all schemes, a stream's rows for all kinds; NAG has a router and rows of its own.
# Streams that a skipped sublayer leaves as they are go through a block as through its sublayers.
KINDS = {
    "plain": [kind for kind in SOME if kind != "whole blocks, selected keys"],
    "nag": ["half", "stages, one kind removed", "whole blocks", "whole blocks, selected keys"],
} | dict.fromkeys(("block_attn_res", "denseformer", "hyper_connections", "deepnorm"), ["half", "whole blocks"])
CASES = [(name, kind) for name in one_per_stream() for kind in KINDS.get(name, ["half"])]


@pytest.mark.parametrize("name, kind", CASES)
def test_capacity_equals_masking(name, kind):
    """Packed documents and padding included: positions, document masks and causality are the original ones."""
    model, batch = make(find_scheme(name)(), SOME[kind]), tiny.packed_batch()
    output, got = run(model, mapped=True)
    ran, real = np.asarray(output.paths["ran"]), batch.segment_ids > 0
    want, scores = masked_reference(model, batch, ran)
    assert_close(got[real], want[real], **tiny.FORWARD)
    assert np.std(want[real]) > 0.05
    rates = np.ravel(model.config.mod.rates(model.config.depth))
    assert [row.sum(-1).tolist() for row in ran] == [[kept(r, tiny.TOKENS)] * tiny.BATCH for r in rates]
    for own, mask in zip(scores, ran, strict=True):  # by the highest scores, padding last
        worst, best = np.where(mask & real, own, np.inf).min(-1), np.where(~mask & real, own, -np.inf).max(-1)
        assert np.all(worst >= best - 1e-4)


@pytest.mark.parametrize("name", ["plain", "nag"])
def test_all_tokens_is_the_dense_model(name):
    """Rate 0, which is the same program, and a rate so low that every token is kept, without a factor on updates."""
    scheme = find_scheme(name)()
    dense = make(scheme, ModConfig())
    _, want = run(dense)
    _, got = run(make(scheme, ModConfig(rate=(0.0, 0.0))))
    np.testing.assert_array_equal(got, want)
    low = make(scheme, ModConfig(rate=(0.1,), router="auto" if name == "nag" else "random"))
    graph, own = nnx.split(low)
    same = nnx.to_pure_dict(own)
    _restore(same, nnx.to_pure_dict(nnx.split(dense)[1]))
    nnx.replace_by_pure_dict(own, same)
    assert kept(0.1, tiny.TOKENS) == tiny.TOKENS
    output, got = run(nnx.merge(graph, own))
    assert_close(got, want, **tiny.FORWARD)  # another program
    assert np.all(output.routing["executed"] == 1.0)


@pytest.mark.parametrize("mod", [{}, {"unit": "block"}, {"router": "skip_class"}, {"decider": "aux_loss"}], ids=str)
def test_a_factor_counts_where_rounding_leaves_nobody_out(mod):
    """A pass that chooses by top-k is the one in which a decider lets everyone in; routers and deciders learn there."""
    mod = {"decider": "threshold"} | mod
    model = make(find_scheme("plain")(), ModConfig(rate=(0.1,), **mod))
    output, got = run(model)
    assert np.all(output.routing["executed"] == 1.0) and np.all(output.routing["cuts"] == 0.0)
    if mod["decider"] == "threshold":
        batch = tiny.packed_batch()
        everyone, want = run(model, batch, causal=True, cuts=jnp.full(6, -jnp.inf))
        assert np.all(everyone.routing["executed"] == 1.0)
        real = batch.segment_ids > 0
        assert_close(got[real], want[real], **tiny.FORWARD)
        assert np.max(np.abs(got - run(make(find_scheme("plain")(), ModConfig()))[1])) > 0.05
    else:
        assert np.all(np.asarray(output.routing["loss"]) > 0.1)


def _restore(into: dict, values: dict) -> None:
    for name, value in values.items():
        _restore(into[name], value) if isinstance(value, dict) else into.__setitem__(name, value)


@pytest.mark.parametrize("name", [*one_per_stream(), "mhc", "highway", "review"])
def test_skipped_tokens_keep_their_residual(name):
    """Neither a router's weight nor a conversion of dtype touches the residual of a skipped token. One scheme for every
    kind of stream, and some whose gates are their own; what `skip` leaves alone is tested below for all."""
    output, _ = run(make(find_scheme(name)(), SOME["half"]), mapped=True)
    skipped = ~np.asarray(output.paths["ran"])
    assert skipped.any() and np.all(np.asarray(output.paths["turn"])[skipped] == 0.0)
    assert np.all(np.asarray(output.paths["turn"])[~skipped] > 0.0)


@pytest.mark.parametrize("name", schemes())
def test_skip_leaves_the_residual_and_serves_the_next_reader(name):
    """A stream that has skipped to a reader is the stream opened for that reader."""
    scheme = find_scheme(name)()
    model = make(scheme, ModConfig(rate=(0.5,)))
    stream, here, opened = _at_second_reader(model)
    skipped = scheme.skip(stream, here)
    for was, now in zip(scheme.lanes(stream), scheme.lanes(skipped), strict=True):
        np.testing.assert_array_equal(was, now)
    assert_close(scheme.read(skipped), scheme.read(opened), terms=16)


def _at_second_reader(model):
    from nagjax.residual import Boundary

    block = jax.tree.map(lambda x: x[0], model.blocks)

    def at(gate, entry, i):
        return Boundary(gate, entry, jnp.int32(i), jnp.int32(i + 1), jnp.float32(1.0), model.config.sublayers)

    embedding = jax.random.normal(jax.random.key(0), (2, 4, model.config.width))
    stream = model.scheme.open(embedding, at(None, block.attention.entry, 0), model.ends)
    opened = model.scheme.open(embedding, at(None, block.mlp.entry, 1), model.ends)
    return stream, at(block.attention.gate, block.mlp.entry, 1), opened


def test_the_batch_is_not_a_python_loop():
    """A program for 128 sequences has as many operations as one for 64 (of fewer rows, products stay apart)."""
    model = make(find_scheme("nag")(), ModConfig(rate=(0.5,)))
    graph, params = nnx.split(model)

    def size(batch):
        def forward(params, tokens):
            return nnx.merge(graph, params)(tokens, Where.whole(batch, tiny.TOKENS)).hidden

        return str(jax.make_jaxpr(forward)(params, jnp.zeros((batch, tiny.TOKENS), jnp.int32))).count(" = ")

    assert size(64) == size(128)


def test_every_sublayer_has_its_own_router():
    params = nnx.to_pure_dict(nnx.split(make(find_scheme("plain")(), ModConfig(rate=(0.5,))))[1])
    routers = [params["blocks"][kind]["routing"]["router"]["weight"] for kind in ("attention", "mlp")]
    rows = np.concatenate(routers)
    assert rows.shape == (6, 16) and len(np.unique(rows[:, 0])) == 6


@pytest.mark.parametrize("name", ["plain", "nag"])
def test_a_block_has_one_router_and_one_choice(name):
    model = make(find_scheme(name)(), SOME["whole blocks"])
    params = nnx.to_pure_dict(nnx.split(model)[1])["blocks"]
    assert not params["mlp"].get("routing") and bool(params["attention"].get("routing")) == (name == "plain")
    output, _ = run(model, mapped=True, observed=True)
    ran = np.asarray(output.paths["ran"])
    np.testing.assert_array_equal(ran[::2], ran[1::2])
    assert not np.array_equal(ran[2], ran[4])
    turned = np.asarray(output.paths["turn"]) > 0
    np.testing.assert_array_equal(turned, ran)  # what is observed between attention and MLP as well
    assert np.all(output.routing["cut"][1::2] == -np.inf) and np.all(np.isfinite(output.routing["cut"][2::2]))


def test_blocks_of_one_rate_share_a_scan():
    """Two stages over 12 blocks are two loops, whatever the depth; alternate blocks are one."""
    for depth in (12, 24):
        assert [g.repeats for g in ModConfig(rate=(0.0, 0.5)).groups(depth)] == [depth // 2] * 2
        (group,) = ModConfig(rate=(0.5,), every=2).groups(depth)
        assert group.repeats == depth // 2 and group.rates == ((0.0, 0.0), (0.5, 0.5))
    assert [g[:2] for g in ModConfig(rate=(0.5,), every=2).groups(5)] == [(0, 2), (4, 1)]
