"""Schemes of several residual streams, or that keep what earlier blocks wrote, recomputed in float64 numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.errors import UserError
from nagjax.layers.embedding import unembed
from nagjax.residual import find_scheme
from nagjax.residual.protocol import SublayerIndex
from nagjax.residual.schemes.mhc import sinkhorn
from tests.residual.stack import assert_rows_close, build, normal, streams

BATCH, TOKENS, WIDTH, SUBLAYERS, VOCAB = 2, 3, 24, 8, 11


def wide(parameter):
    return np.asarray(parameter[...], np.float64)


def inputs():
    return (
        0.5 * normal(1, BATCH, TOKENS, WIDTH),
        normal(2, SUBLAYERS, BATCH, TOKENS, WIDTH) + 0.1,
        normal(3, VOCAB, WIDTH),
    )


def unit(x, axes=-1, epsilon=1e-6):
    return x / np.sqrt(np.mean(x**2, axis=axes, keepdims=True) + epsilon)


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def check(scheme, reads, sublayers=SUBLAYERS, chain=48):
    """`reads(stack, embedding, updates)` gives what each reader's norm is put on, then the residual telemetry sees."""
    embedding, updates, table = inputs()
    updates = updates[:sublayers]
    stack = build(scheme, width=WIDTH, sublayers=sublayers)
    seen = streams(stack, embedding, updates)
    want = list(reads(stack, embedding.astype(np.float64), updates.astype(np.float64)))
    assert len(want) == len(seen)
    for entry, stream, (read, residual) in zip(stack.entries, seen, want, strict=True):
        read = wide(entry.gain) * unit(read)
        assert_rows_close(scheme.read(stream), read, chain=chain)
        direction, log_norm = scheme.lanes(stream)
        assert_rows_close(np.exp(log_norm)[..., None] * direction, residual, chain=chain)
    logits = unembed(*scheme.close(seen[-1], stack.ends), scheme.head_rows(jnp.asarray(table)))
    assert_rows_close(logits, read @ table.T.astype(float), terms=WIDTH, chain=chain)


@pytest.mark.parametrize("n", [1, 3, 4])
def test_hyper_connections(n):
    def reads(stack, embedding, updates):
        H = np.repeat(embedding[..., None, :], n, axis=2)
        for done, entry in enumerate(stack.entries):
            if done:
                own, u = stack.gates[done - 1], updates[done - 1]
                r = wide(own.mixing_scale) * np.tanh(unit(H) @ wide(own.mixing_weight)) + wide(own.mixing)
                b = wide(own.output_scale) * np.tanh(unit(H) @ wide(own.output_weight)) + wide(own.output)
                H = np.swapaxes(r, -1, -2) @ H + b[..., None] * u[..., None, :]
            a = np.ones(n) if done == SUBLAYERS else np.eye(n)[done % n]
            a = a + wide(entry.moved) + wide(entry.scale) * np.tanh(unit(H) @ wide(entry.weight))
            yield np.sum(a[..., None] * H, axis=2), H.mean(2)

    check(find_scheme("hyper_connections")(streams=n), reads)


@pytest.mark.parametrize("n", [1, 4])
def test_mhc(n):
    def project(own, X):
        flat = unit(X, (2, 3)).reshape(BATCH, TOKENS, n * WIDTH)
        return wide(own.alpha) * (flat @ wide(own.phi).reshape(n * WIDTH, -1)) + wide(own.bias)

    def reads(stack, embedding, updates):
        X = np.repeat(embedding[..., None, :], n, axis=2)
        for done, entry in enumerate(stack.entries):
            if done:
                own = stack.gates[done - 1]
                res = np.exp(project(own.res, X)).reshape(BATCH, TOKENS, n, n)
                for _ in range(20):
                    res = res / res.sum(-2, keepdims=True)
                    res = res / res.sum(-1, keepdims=True)
                post = 2.0 * sigmoid(project(own.post, X))
                X = res @ X + post[..., None] * updates[done - 1][..., None, :]
            pre = sigmoid(project(entry.pre, X))
            yield np.sum(pre[..., None] * X, axis=2), X.mean(2)

    check(find_scheme("mhc")(streams=n), reads)


def test_sinkhorn_is_doubly_stochastic_and_finite_where_logits_are_far_apart():
    matrices = np.asarray(sinkhorn(jnp.asarray(normal(0, 50, 4, 4))), np.float64)
    assert np.all(matrices > 0)
    np.testing.assert_allclose(matrices.sum(-1), 1, atol=1e-6)
    np.testing.assert_allclose(matrices.sum(-2), 1, atol=1e-3)
    far = jnp.asarray([[300.0, 0.0], [0.0, 0.0]])
    assert np.all(np.isfinite(sinkhorn(far))) and np.all(np.isfinite(jax.grad(lambda x: sinkhorn(x)[0, 0])(far)))


@pytest.mark.parametrize("blocks, sizes", [(3, (3, 3, 2)), (8, (1,) * 8), (20, (1,) * 8), (1, (8,))])
def test_block_attn_res(blocks, sizes):
    def reads(stack, embedding, updates):
        block_of = np.repeat(np.arange(len(sizes)), sizes)
        sources = [embedding]
        yield embedding, embedding
        for sublayer, u in enumerate(updates):
            if sublayer == 0 or block_of[sublayer] != block_of[sublayer - 1]:
                sources.append(u)
            else:
                sources[-1] = sources[-1] + u
            v = np.stack(sources)
            a = np.exp(unit(v) @ wide(stack.gates[sublayer].query))
            yield np.sum((a / a.sum(0))[..., None] * v, axis=0), v.sum(0)

    check(find_scheme("block_attn_res")(blocks=blocks), reads)


@pytest.mark.parametrize("sublayers", [SUBLAYERS, SUBLAYERS - 1])
@pytest.mark.parametrize("points, period", [(2, 2), (3, 2), (4, 1), (9, 1), (1, 4)])
def test_denseformer(points, period, sublayers):
    def reads(stack, embedding, updates):
        alpha = wide(stack.ends.alpha)
        past, h = [embedding], embedding
        yield h, h
        for sublayer, u in enumerate(updates, 1):
            h = h + u
            if sublayer % (2 * period) == 0 or sublayer == sublayers:  # the last block is a point
                past.append(h)
                row = alpha[len(past) - 2]
                h = sum(row[j] * x for j, x in enumerate(past))
            yield h, h

    check(find_scheme("denseformer")(points=points), reads, sublayers)


@pytest.mark.parametrize("name", ["hyper_connections", "mhc", "block_attn_res", "denseformer"])
def test_at_its_start_each_reads_what_plain_reads(name):
    embedding, updates, _ = inputs()
    scheme, plain = find_scheme(name)(), find_scheme("plain")()
    stack = build(scheme, width=WIDTH, sublayers=SUBLAYERS, moved=0.0)
    rel = 2e-5  # epsilon, where the sum that is read is of another length
    if name == "mhc":
        for own in [entry.pre for entry in stack.entries] + [p for gate in stack.gates for p in (gate.post, gate.res)]:
            assert float(own.alpha[...]) == np.float32(0.01) and not np.any(own.bias[...])
            own.alpha = nnx.Param(jnp.float32(0.0))
    want = streams(build(plain, width=WIDTH, sublayers=SUBLAYERS, moved=0.0), embedding, updates)
    for got, expected in zip(streams(stack, embedding, updates), want, strict=True):
        assert_rows_close(scheme.read(got), plain.read(expected), rel)
        if name in ("hyper_connections", "mhc"):
            assert_rows_close(got.hidden, np.repeat(expected.hidden[..., None, :], 4, axis=2))


def test_a_source_nobody_wrote_to_has_no_weight():
    """A token that skips the first sublayer of a block, and one whose update there is zero: the second has one source
    more."""
    scheme = find_scheme("block_attn_res")(blocks=2)
    stack = build(scheme, width=WIDTH, sublayers=4)
    embedding, updates, _ = inputs()
    from tests.residual.stack import boundary

    opened = scheme.open(jnp.asarray(embedding), boundary(stack, 0), stack.ends)
    skipped = scheme.skip(opened, boundary(stack, 1))
    again, _ = scheme.advance(skipped, jnp.asarray(updates[0]), boundary(stack, 2))
    zero, _ = scheme.advance(opened, jnp.zeros_like(embedding), boundary(stack, 1))
    assert np.all(skipped.written.sum(-1) == 1) and np.all(zero.written.sum(-1) == again.written.sum(-1))
    np.testing.assert_array_equal(again.values[..., 1, :], updates[0])


def test_start_scales_and_options():
    sublayer = SublayerIndex(3, 16)
    assert find_scheme("hyper_connections")(streams=4).output_scale(sublayer) == pytest.approx(0.5 * 16**-0.5)
    assert find_scheme("hyper_connections")(scaled_start=False).output_scale(sublayer) == pytest.approx(0.5)
    for name in ("mhc", "block_attn_res", "denseformer"):
        assert find_scheme(name)().output_scale(sublayer) == pytest.approx(16**-0.5)
    for name, field in {"hyper_connections": "streams", "mhc": "streams", "block_attn_res": "blocks"}.items():
        with pytest.raises(UserError, match=f"scheme.{field} = 0"):
            find_scheme(name)(**{field: 0})
    with pytest.raises(UserError, match="scheme.points = 0"):
        find_scheme("denseformer")(points=0)
