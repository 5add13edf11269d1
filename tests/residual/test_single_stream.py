"""The baselines of one stream and fixed constants: their equations in float64, their initial values, their limits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.errors import UserError
from nagjax.model.config import ModelConfig
from nagjax.model.transformer import Transformer
from nagjax.residual import find_scheme
from nagjax.residual.module import module_of
from nagjax.residual.protocol import SublayerIndex, telemetry
from tests.residual.stack import assert_rows_close, boundary, build, normal, streams

BATCH, TOKENS, WIDTH, SUBLAYERS = 2, 3, 24, 8


def wide(parameter):
    return np.asarray(parameter[...], np.float64)


def unit(x):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def inputs(size=0.7):
    embedding = 0.3 * normal(1, BATCH, TOKENS, WIDTH) + 0.05
    return embedding, size * normal(2, SUBLAYERS, BATCH, TOKENS, WIDTH) + 0.1


# Each recurrence: (stack, embedding, updates) -> residuals h_0 .. h_S, and what sublayers 1 .. S and the head read.


def post_norm(alpha):
    def states(stack, embedding, updates):
        h = [embedding]
        for u, gate in zip(updates, stack.gates, strict=True):
            h.append(wide(gate.gain) * unit(alpha * h[-1] + u))
        return h, h

    return states


def post_layer_norm(stack, embedding, updates):
    def normed(own, x):
        centred = x - x.mean(-1, keepdims=True)
        return wide(own.gain) * centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + 1e-12) + wide(own.bias)

    h = [normed(stack.ends, embedding)]
    for u, gate in zip(updates, stack.gates, strict=True):
        h.append(normed(gate, h[-1] + u))
    return h, h


def pre_norm(commit, open_=lambda stack, e: e):
    def states(stack, embedding, updates):
        h = [open_(stack, embedding)]
        for u, gate in zip(updates, stack.gates, strict=True):
            h.append(commit(gate, h[-1], u))
        return h, [wide(entry.gain) * unit(x) for x, entry in zip(h, stack.entries, strict=True)]

    return states


def mix(border):
    """The source's layers one after the other: Post-LN up to the border, Pre-LN behind it; each gain where the scheme
    has it."""

    def states(stack, embedding, updates):
        gains = [wide(entry.gain) for entry in stack.entries]
        h, x = [embedding], []
        for index, u in enumerate(updates, 1):
            if index <= border:
                x.append(gains[0] * h[-1] if index == 1 else h[-1])
                h.append(gains[index] * unit(h[-1] + u))
            else:
                x.append((1.0 if index == border + 1 and border else gains[index - 1]) * unit(h[-1]))
                h.append(h[-1] + u)
        x.append((1.0 if border == len(updates) else gains[-1]) * unit(h[-1]))
        return h, x

    return states


def sandwich(gate, h, u):
    return h + wide(gate.gain) * unit(u)


def gated(gate, h, u):
    return h + wide(gate.value) * u


def no_norm(stack, embedding, updates):
    h = [embedding]
    for u, gate in zip(updates, stack.gates, strict=True):
        h.append(gated(gate, h[-1], u))
    return h, h


def norm_in_the_branch(stack, embedding, updates):
    h, _ = no_norm(stack, embedding, updates)
    return h, [unit(x) for x in h]


EQUATIONS = {
    "post_ln": ({}, post_norm(1.0)),
    "post_layer_norm": ({}, post_layer_norm),
    "deepnorm": ({}, post_norm(8**0.25)),  # 4 blocks
    "deepnorm-odd": ({}, post_norm(8**0.25)),  # the last has one sublayer
    "mix_ln": ({}, mix(2)),
    "mix_ln-none": ({"post": 0.2}, mix(0)),
    "mix_ln-half": ({"post": 0.5}, mix(4)),
    "mix_ln-all": ({"post": 1.0}, mix(8)),
    "mix_ln-all-odd": ({"post": 1.0}, mix(7)),
    "sandwich": ({}, pre_norm(sandwich)),
    "peri_ln": ({}, pre_norm(sandwich, lambda stack, e: wide(stack.ends.gain) * unit(e))),
    "layer_scale": ({}, pre_norm(gated)),
    "skip_init": ({}, pre_norm(gated)),
    "rezero": ({}, no_norm),
    "rezero_prenorm": ({}, norm_in_the_branch),
    "depth_scaled": ({}, pre_norm(lambda gate, h, u: h + u)),
}


@pytest.mark.parametrize("case", EQUATIONS)
def test_equations(case):
    options, states = EQUATIONS[case]
    scheme = find_scheme(case.split("-")[0])(**options)
    embedding, updates = inputs()
    updates = updates[: SUBLAYERS - case.endswith("odd")]
    stack = build(scheme, width=WIDTH, sublayers=len(updates))
    seen = streams(stack, embedding, updates)
    residuals, reads = states(stack, embedding.astype(np.float64), updates.astype(np.float64))
    for stream, h, x in zip(seen, residuals, reads, strict=True):
        assert_rows_close(scheme.read(stream), x)
        direction, log_rms = scheme.lanes(stream)
        assert_rows_close(np.exp(log_rms)[..., None] * direction, h)
    hidden, log_scale = scheme.close(seen[-1], stack.ends)
    assert_rows_close(hidden, residuals[-1] if case == "rezero_prenorm" else reads[-1])  # its head has no norm
    assert not np.any(log_scale)


def test_the_head_reads_the_norm_where_there_is_a_final_one():
    embedding, updates = inputs(50.0)
    final = {}
    for name in ("post_ln", "deepnorm", "mix_ln", "sandwich", "peri_ln", "layer_scale", "rezero"):
        stack = build(find_scheme(name)(), width=WIDTH, sublayers=SUBLAYERS, moved=0.0)
        hidden, _ = stack.scheme.close(streams(stack, embedding, updates)[-1], stack.ends)
        final[name] = float(np.sqrt(np.mean(np.square(hidden))))
    assert final.pop("rezero") == pytest.approx(
        np.sqrt(np.mean(embedding**2)), rel=1e-5
    )  # it has none, and starts shut
    np.testing.assert_allclose(list(final.values()), 1.0, atol=1e-4)


def test_start_values():
    def gates(name, sublayers, **options):
        built = build(find_scheme(name)(**options), width=4, sublayers=sublayers, moved=0.0)
        return np.unique([np.asarray(gate.value[...]) for gate in built.gates])

    assert gates("rezero", 6) == [0.0]
    assert gates("skip_init", 32) == pytest.approx([0.25]) and gates("skip_init", 32, start=0.5) == [0.5]
    for blocks, start in ((18, 0.1), (19, 1e-5), (24, 1e-5), (25, 1e-6)):
        assert gates("layer_scale", 2 * blocks) == pytest.approx([start])
    assert gates("layer_scale", 50, start=0.2) == pytest.approx([0.2])


def test_factors_of_the_start_by_depth():
    deepnorm, scaled = find_scheme("deepnorm")(), find_scheme("depth_scaled")()
    for blocks in (2, 32):
        sublayer = SublayerIndex(3, 2 * blocks)
        assert deepnorm.output_scale(sublayer) == deepnorm.inner_scale(sublayer) == pytest.approx((8 * blocks) ** -0.25)
        assert deepnorm.kept(boundary(build(deepnorm, width=4, sublayers=2 * blocks), 1)) == pytest.approx(
            (2 * blocks) ** 0.25
        )
    by_sublayer = [float(scaled.output_scale(SublayerIndex(jnp.int32(index), 6))) for index in range(1, 7)]
    np.testing.assert_allclose(by_sublayer, np.array([2, 2, 4, 4, 6, 6]) ** -0.5, rtol=1e-6)
    assert scaled.inner_scale(SublayerIndex(3, 6)) == 1.0


def test_starts_reach_the_matrices_they_are_for():
    """DeepNorm divides values, outputs and up projections, but not queries, keys or the gate inside SwiGLU."""
    config = ModelConfig(depth=3, width=64, heads=2, vocab=7, context=4)
    blocks = Transformer(config, find_scheme("deepnorm")(), nnx.Rngs(0)).blocks
    for sublayer, divided in ((blocks.attention, ("value", "out")), (blocks.mlp, ("up", "down"))):
        for name, weight in nnx.to_pure_dict(nnx.state(sublayer.branch, nnx.Param)).items():
            spread = np.std(weight * weight.shape[1] ** 0.5, axis=(1, 2))
            np.testing.assert_allclose(spread, 24**-0.25 if name in divided else 1.0, rtol=0.1, err_msg=name)


def test_what_starts_shut_is_open_to_gradients():
    """The embedding goes through ReZero and LayerScale (deep) as it is, and the factors see a gradient at once."""
    embedding, updates = inputs()
    for name, exact in (("rezero", 0.0), ("layer_scale", 1e-4)):
        stack = build(find_scheme(name)(), width=WIDTH, sublayers=50, moved=0.0)
        many = np.concatenate([updates] * 7)[:50]
        _, log_rms = stack.scheme.lanes(streams(stack, embedding, many)[-1])
        assert_rows_close(np.exp(log_rms), np.sqrt(np.mean(embedding.astype(np.float64) ** 2, -1)), exact)
        graph, gates = nnx.split(stack.gates)

        def loss(gates, stack=stack, graph=graph, many=many):
            moved = stack._replace(gates=nnx.merge(graph, gates))
            return jnp.sum(streams(moved, embedding, many)[-1][0] ** 2)

        assert all(np.all(np.asarray(g) != 0) for g in jax.tree.leaves(jax.grad(loss)(gates)))


def test_special_cases_are_the_schemes_they_are():
    """No Post-LN block is plain, all of them are Post-LN; with factors of one, LayerScale and SkipInit are plain, and
    so is Sandwich where branches already write unit rows."""
    embedding, updates = inputs()
    plain = build(find_scheme("plain")(), width=WIDTH, sublayers=SUBLAYERS)
    want = [stream.normed for stream in streams(plain, embedding, updates)]
    for scheme in (
        find_scheme("mix_ln")(post=0.0),
        find_scheme("layer_scale")(start=1.0),
        find_scheme("skip_init")(start=1.0),
        find_scheme("depth_scaled")(),
    ):
        still = build(scheme, width=WIDTH, sublayers=SUBLAYERS, moved=0.0)._replace(entries=plain.entries)
        for got, expected in zip(streams(still, embedding, updates), want, strict=True):
            assert_rows_close(got.normed, expected)
    rows = unit(updates.astype(np.float64)).astype(np.float32)
    still = build(find_scheme("sandwich")(), width=WIDTH, sublayers=SUBLAYERS, moved=0.0)._replace(
        entries=plain.entries
    )
    for got, expected in zip(streams(still, embedding, rows), streams(plain, embedding, rows), strict=True):
        assert_rows_close(got.normed, expected.normed, 5e-6)

    mixed = build(find_scheme("mix_ln")(post=1.0), width=WIDTH, sublayers=SUBLAYERS, moved=0.0)
    post = build(find_scheme("post_ln")(), width=WIDTH, sublayers=SUBLAYERS, moved=0.0)
    for got, expected in zip(streams(mixed, embedding, updates), streams(post, embedding, updates), strict=True):
        assert_rows_close(got.hidden, expected)


def test_a_share_of_the_blocks_is_rounded_down_as_a_number_of_blocks():
    for share, blocks, post in ((0.25, 12, 3), (0.25, 3, 0), (0.06, 50, 3), (0.29, 100, 29), (0.06, 32, 1)):
        scheme = find_scheme("mix_ln")(post=share)
        at = boundary(build(scheme, width=2, sublayers=2), 1)._replace(sublayers=2 * blocks)
        assert scheme.border(at) == 2 * post
    for bad in (-0.1, 1.1):
        with pytest.raises(UserError, match="scheme.post"):
            find_scheme("mix_ln")(post=bad)


def test_peri_ln_starts_from_a_unit_row_and_grows_by_unit_rows():
    stack = build(find_scheme("peri_ln")(), width=WIDTH, sublayers=SUBLAYERS, moved=0.0)
    embedding, updates = inputs(1e3)
    sizes = [np.mean(np.exp(2 * np.asarray(stack.scheme.lanes(s)[1]))) for s in streams(stack, embedding, updates)]
    np.testing.assert_allclose(sizes, 1 + np.arange(SUBLAYERS + 1), rtol=0.5)  # unit rows that know nothing of another
    assert sizes[0] == pytest.approx(1.0, abs=1e-4)


def test_a_post_norm_state_does_not_grow():
    for name in ("post_ln", "deepnorm"):
        stack = build(find_scheme(name)(), width=WIDTH, sublayers=SUBLAYERS, moved=0.0)
        seen = streams(stack, *inputs(20.0))
        notes = telemetry(stack.scheme, seen[3], seen[4], jnp.ones((1, 1, 1)))
        assert abs(notes["growth"]) < 1e-5 and abs(notes["log_norm"]) < 1e-5 and notes["turn"] > 0.5


WEIGHTED = ("completep", "prores", "skip_init", "layer_scale")  # a branch's output times something small


@pytest.mark.parametrize("name", WEIGHTED)
@pytest.mark.parametrize("narrow", [jnp.float16, jnp.bfloat16])
def test_a_narrow_update_is_weighed_in_the_residuals_precision(name, narrow):
    own, x = module_of(find_scheme(name))(WIDTH, 40, rngs=nnx.Rngs(0)), jnp.zeros((2, WIDTH))
    update = jnp.full((2, WIDTH), 1e-5, narrow)
    moved = [own.advance(own.open(x, 0.01), u, 40).rows.hidden for u in (update, update.astype(jnp.float32))]
    np.testing.assert_allclose(*moved, rtol=1e-5)
    assert np.all(moved[0] > 0)
