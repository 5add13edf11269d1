"""Settings at which one scheme must be another, and updates at the edges of the number range."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.errors import UserError
from nagjax.residual.registry import find_scheme, schemes
from nagjax.residual.schemes.nag import NAG
from nagjax.residual.schemes.review import Review
from tests.residual.stack import assert_rows_close, build, normal, streams

BATCH, TOKENS, WIDTH, SUBLAYERS = 2, 3, 24, 6


def inputs():
    return normal(1, BATCH, TOKENS, WIDTH), normal(2, SUBLAYERS, BATCH, TOKENS, WIDTH)


def with_gate_bias(stack, value):
    for gate in stack.gates:
        gate.bias = nnx.Param(jnp.full_like(gate.bias[...], value))
    return stack


def with_entries_of(stack, other):
    return stack._replace(entries=other.entries)


def test_an_open_gate_is_plain():
    plain = build(find_scheme("plain")(), width=WIDTH, sublayers=SUBLAYERS)
    want = streams(plain, *inputs())
    # Review's own epsilon, 1e-5 and not 1e-6, moves a small row's norm by a few 1e-5; nothing else may.
    for scheme, exact in (("highway", 2e-6), ("review", 5e-5)):
        stack = with_gate_bias(build(find_scheme(scheme)(), width=WIDTH, sublayers=SUBLAYERS), 1e4)
        for got, expected in zip(streams(with_entries_of(stack, plain), *inputs()), want, strict=True):
            np.testing.assert_array_equal(got.hidden, expected.hidden)
            assert_rows_close(got.normed, expected.normed, exact)


def test_a_shut_gate_keeps_the_stream():
    embedding, updates = inputs()
    for name in ("highway", "highway_convex", "review"):
        stack = with_gate_bias(build(find_scheme(name)(), width=WIDTH, sublayers=SUBLAYERS), -1e4)
        np.testing.assert_array_equal(streams(stack, embedding, updates)[-1].hidden, embedding)


def test_lns_of_one_block_is_plain():
    embedding, updates = inputs()
    plain = build(find_scheme("plain")(), width=WIDTH, sublayers=2)
    lns = plain._replace(scheme=find_scheme("lns")())
    got, want = streams(lns, embedding, updates[:2]), streams(plain, embedding, updates[:2])
    jax.tree.map(np.testing.assert_array_equal, got, want)
    deeper = build(find_scheme("lns")(), width=WIDTH, sublayers=3, moved=0.0)
    assert_rows_close(streams(deeper, embedding, updates[:3])[2].normed * np.sqrt(2.0), want_third(embedding, updates))


def want_third(embedding, updates):
    h = (embedding + updates[0] + updates[1]).astype(np.float64)
    return h / np.sqrt(np.mean(h**2, -1, keepdims=True) + 1e-6)


def test_review_starts_half_open():
    embedding, updates = inputs()
    for scheme in (Review(), Review(rank=2)):
        stack = build(scheme, width=WIDTH, sublayers=SUBLAYERS, moved=0.0)
        assert_rows_close(streams(stack, embedding, updates)[-1].hidden, embedding + 0.5 * updates.sum(0, dtype=float))


def test_nag_is_plain_pre_norm_where_updates_have_the_length_it_would_give_them():
    """With m = 1 and updates orthogonal to the residual, centred, and of RMS alpha * exp(s), the rotation in two lanes
    is the ordinary sum: exp(s) r = h, and a plain stream without gains reads the same x."""
    embedding, updates = inputs()
    embedding = embedding - embedding.mean(-1, keepdims=True)
    nag = with_gate_bias(build(NAG(), width=WIDTH, sublayers=SUBLAYERS, moved=0.0), 200.0)
    plain = build(find_scheme("plain")(), width=WIDTH, sublayers=SUBLAYERS, moved=0.0)

    h, written = embedding.astype(np.float64), []
    for index, u in enumerate(updates.astype(np.float64), 1):
        u = u - u.mean(-1, keepdims=True)
        u = u - np.sum(u * h, -1, keepdims=True) / np.sum(h * h, -1, keepdims=True) * h
        length = index**-0.5 * np.linalg.norm(h, axis=-1, keepdims=True)
        written.append(length * u / np.linalg.norm(u, axis=-1, keepdims=True))
        h = h + written[-1]
    written = np.asarray(written, np.float32)
    for two, one in zip(streams(nag, embedding, written), streams(plain, embedding, written), strict=True):
        assert_rows_close(np.exp(two.log_norm)[..., None] * two.direction, one.hidden)
        assert_rows_close(nag.scheme.read(two), plain.scheme.read(one), 1e-5)  # plain's epsilon
    assert_rows_close(one.hidden, h)


EDGES = {"zero": (0.0, "float32"), "zero16": (0.0, "bfloat16"), "1e4": (1e4, "bfloat16"), "1e18": (1e18, "float32")}


@functools.cache
def edge_program(name):
    """A stack of two sublayers, and the jitted values and gradients of what it makes of updates: compiled once for
    each dtype, whatever the size."""
    scheme = find_scheme(name)()
    stack = build(scheme, width=WIDTH, sublayers=2, moved=0.05)
    graph, params = nnx.split((stack.entries, stack.gates, stack.ends))

    def loss(params, embedding, updates):
        entries, gates, ends = nnx.merge(graph, params)
        moved = stack._replace(entries=entries, gates=gates, ends=ends)
        stream = streams(moved, embedding, updates)[-1]
        hidden, log_scale = scheme.close(stream, ends)
        return jnp.mean(hidden.astype(jnp.float32) * normal(3, BATCH, TOKENS, WIDTH)) + jnp.mean(log_scale)

    return stack, params, jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))


@pytest.mark.parametrize("edge", EDGES)
@pytest.mark.parametrize("name", schemes())
def test_zero_and_huge_updates_have_finite_values_and_gradients(name, edge):
    size, dtype = EDGES[edge]
    stack, params, program = edge_program(name)
    embedding = jnp.asarray(normal(1, BATCH, TOKENS, WIDTH), dtype)
    updates = jnp.asarray(size * normal(2, 2, BATCH, TOKENS, WIDTH), dtype)
    value, grads = program(params, embedding, updates)
    assert np.isfinite(value)
    bad = [
        jax.tree_util.keystr(path)
        for path, g in jax.tree_util.tree_leaves_with_path(grads)
        if not np.all(np.isfinite(np.asarray(g, np.float32)))
    ]
    assert not bad
    if name == "nag":
        final = streams(stack, embedding, updates)[-1]
        np.testing.assert_allclose(np.sqrt(np.mean(np.asarray(final.direction, float) ** 2, -1)), 1.0, atol=2.0**-8)


def test_options_are_checked():
    for make, field in (
        (lambda: Review(rank=0), "scheme.rank"),
        (lambda: NAG(directions=0), "scheme.directions"),
        (lambda: NAG(ramp=1.0), "scheme.ramp"),
    ):
        with pytest.raises(UserError, match=field):
            make()
    with pytest.raises(dataclasses.FrozenInstanceError):
        NAG().ramp = 0.5
