"""Every scheme's equations, recomputed in float64 numpy straight from the papers' formulas."""

import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.layers.embedding import unembed
from nagjax.residual import find_scheme
from nagjax.residual.schemes.review import Review
from tests.residual.stack import assert_rows_close, build, normal, streams
from tests.tolerance import assert_close

BATCH, TOKENS, WIDTH, SUBLAYERS, VOCAB = 2, 3, 24, 8, 11


def wide(parameter):
    return np.asarray(parameter[...], np.float64)


def sigmoid(x):
    return 1.0 / (1.0 + np.exp(-x))


def unit(x, epsilon):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)


# How each pre-norm scheme commits: (gate parameters, h, u) -> h'.


def add(gate, h, u):
    return h + u


def review_dense(gate, h, u):
    r = sigmoid(unit(h, 1e-5) @ wide(gate.state) + unit(u, 1e-5) @ wide(gate.update) + wide(gate.bias))
    return h + r * u


def review_low_rank(gate, h, u):
    (down_h, down_u), (up_h, up_u) = wide(gate.down), wide(gate.up)
    return h + u * sigmoid(unit(h, 1e-5) @ (down_h @ up_h) + unit(u, 1e-5) @ (down_u @ up_u) + wide(gate.bias))


def highway(gate, h, u):
    return h + sigmoid(h @ wide(gate.weight) + wide(gate.bias)) * u


def highway_convex(gate, h, u):
    r = sigmoid(h @ wide(gate.weight) + wide(gate.bias))
    return (1.0 - r) * h + r * u


def no_scale(sublayer):
    return 1.0


def lns_scale(sublayer):
    return {1: 1, 2: 1, 3: 2, 4: 2, 5: 3, 6: 3, 7: 4, 8: 4}[sublayer] ** -0.5


PRE_NORM = {
    "plain": (find_scheme("plain")(), add, no_scale, 1e-6),
    "lns": (find_scheme("lns")(), add, lns_scale, 1e-6),
    "review": (Review(), review_dense, no_scale, 1e-5),
    "review_rank_3": (Review(rank=3), review_low_rank, no_scale, 1e-5),
    "highway": (find_scheme("highway")(), highway, no_scale, 1e-6),
    "highway_convex": (find_scheme("highway_convex")(), highway_convex, no_scale, 1e-6),
}


def inputs(size=0.7):
    embedding = 0.3 * normal(1, BATCH, TOKENS, WIDTH) + 0.05
    return embedding, size * normal(2, SUBLAYERS, BATCH, TOKENS, WIDTH) + 0.1, normal(3, VOCAB, WIDTH) + 0.2


@pytest.mark.parametrize("name", PRE_NORM)
def test_pre_norm_schemes(name):
    scheme, commit, scale, epsilon = PRE_NORM[name]
    embedding, updates, table = inputs()
    stack = build(scheme, width=WIDTH, sublayers=SUBLAYERS)
    seen = streams(stack, embedding, updates)

    h = embedding.astype(np.float64)
    for done, stream in enumerate(seen):
        if done:
            h = commit(stack.gates[done - 1], h, updates[done - 1].astype(np.float64))
        factor = scale(done + 1) if done < SUBLAYERS else 1.0  # the head's norm is not scaled
        read = factor * wide(stack.entries[done].gain) * unit(h, epsilon)
        assert_rows_close(stream.hidden, h)
        assert_rows_close(scheme.read(stream), read)

    hidden, log_scale = scheme.close(seen[-1], stack.ends)
    logits = unembed(hidden, log_scale, scheme.head_rows(jnp.asarray(table)))
    assert_rows_close(logits, read @ table.T.astype(float), terms=WIDTH)


@pytest.mark.parametrize("progress", [1.0, 0.02], ids=["full", "ramp"])
@pytest.mark.parametrize("name", ["nag", "nag_harmonic"])
def test_nag(name, progress):
    scheme = find_scheme(name)(directions=5)
    power = {"nag": 0.5, "nag_harmonic": 1.0}[name]
    start = [float(gate.alpha[...]) for gate in build(scheme, width=WIDTH, sublayers=SUBLAYERS, moved=0.0).gates]
    assert start == pytest.approx([sublayer**-power for sublayer in range(1, SUBLAYERS + 1)])
    embedding, updates, table = inputs()
    stack = build(scheme, width=WIDTH, sublayers=SUBLAYERS)
    seen = streams(stack, embedding, updates, progress)
    ramp = min(progress / 0.05, 1.0)

    e = embedding.astype(np.float64)
    e = e - e.mean(-1, keepdims=True)
    rho = np.linalg.norm(e, axis=-1) / np.sqrt(WIDTH)
    r, s = e / rho[..., None], np.log(rho) + float(stack.ends.encode[...])
    for done, stream in enumerate(seen):
        if done:
            gate, u = stack.gates[done - 1], updates[done - 1].astype(np.float64)
            u = u - u.mean(-1, keepdims=True)
            u_perp = u - np.sum(u * r, -1, keepdims=True) / WIDTH * r
            n = np.sqrt(WIDTH) * u_perp / np.linalg.norm(u_perp, axis=-1, keepdims=True)
            p = np.exp(wide(gate.logits)) / np.sum(np.exp(wide(gate.logits)))
            beta = np.log1p(np.exp(wide(gate.beta)))
            m = np.sum(p * sigmoid(r @ wide(gate.weight) + wide(gate.bias)), -1) ** beta
            t = ramp * wide(gate.alpha) * m
            r = (r + t[..., None] * n) / np.sqrt(1.0 + t**2)[..., None]
            s = s + 0.5 * np.log(1.0 + t**2)
        assert_rows_close(scheme.read(stream), r)
        assert_close(stream.log_norm, s, terms=1, chain=12, scale=1.0)

    rows = table.astype(np.float64)
    rows = rows - rows.mean(-1, keepdims=True)
    rows = np.sqrt(WIDTH) * rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    head = scheme.head_rows(jnp.asarray(table))
    assert_rows_close(head, rows)
    logits = np.exp(s + float(stack.ends.decode[...]))[..., None] * (r @ rows.T) / WIDTH
    assert_rows_close(unembed(*scheme.close(seen[-1], stack.ends), head), logits, terms=WIDTH)  # exp of the lanes' sum


def test_telemetry_is_what_it_says():
    """telemetry() of one update against the same measures of the vectors."""
    from nagjax.residual.protocol import telemetry

    embedding, updates, _ = inputs()
    for scheme in (find_scheme("plain")(), find_scheme("nag")()):
        stack = build(scheme, width=WIDTH, sublayers=2)
        _, before, after = streams(stack, embedding, updates[:2])
        gate = np.full((BATCH, TOKENS, 1), 0.04, np.float32)
        gate[0, 0] = 0.5
        notes = telemetry(scheme, before, after, gate)

        def residual(stream, scheme=scheme):
            if scheme.name == "plain":
                return np.asarray(stream.hidden, np.float64)
            return np.exp(np.asarray(stream.log_norm, np.float64))[..., None] * np.asarray(stream.direction, np.float64)

        old, new = residual(before), residual(after)
        norm = lambda x: np.linalg.norm(x, axis=-1)  # noqa: E731
        cosine = np.sum(old * new, -1) / norm(old) / norm(new)
        assert_close(notes["turn"], np.mean(np.arccos(cosine)), terms=1, chain=12, scale=1.0)
        assert_close(notes["ratio"], np.mean(norm(new - old) / norm(old)), terms=1, chain=12, scale=1.0)
        assert_close(notes["growth"], np.mean(np.log(norm(new) / norm(old))), terms=1, chain=12, scale=1.0)
        assert_close(notes["log_norm"], np.mean(np.log(norm(new) / np.sqrt(WIDTH))), terms=1, chain=12, scale=1.0)
        assert_close(notes["gate"], np.mean(gate), terms=1, chain=12, scale=1.0)
        assert_close(notes["closed"], 5 / 6, terms=1, chain=12, scale=1.0)
