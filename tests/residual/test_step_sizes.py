"""Schemes that set how far an update may move the state: their recurrences in float64 numpy, and their constants."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.errors import UserError
from nagjax.layers.config import BlockConfig
from nagjax.layers.embedding import unembed
from nagjax.residual import find_scheme
from nagjax.residual.protocol import SublayerIndex
from nagjax.train.checkpoint.store import Checkpoints
from nagjax.train.distributed.mesh import batch_sharding
from tests import tiny
from tests.residual.stack import assert_rows_close, boundary, build, normal, streams
from tests.tolerance import assert_close

BATCH, TOKENS, WIDTH, SUBLAYERS, VOCAB = 2, 3, 24, 8, 11


def wide(parameter):
    return np.asarray(parameter[...], np.float64)


def unit(x, epsilon=1e-6):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)


def inputs():
    embedding = normal(1, BATCH, TOKENS, WIDTH) + 0.1
    return embedding, normal(2, SUBLAYERS, BATCH, TOKENS, WIDTH) + 0.3, normal(3, VOCAB, WIDTH)


def keel(gate, h, u, sublayer):
    """Of the first block, attention adds and the MLP's skip has weight 1."""
    if sublayer == 1:
        return h + wide(gate.gain) * u
    return wide(gate.gain) * unit((1 if sublayer == 2 else SUBLAYERS) * h + u)


def prores(progress):
    """4 blocks, the last fully in at half the training: at 0.2, block b is in by 4 * 0.2 / (0.5 b), at most all."""
    weights = {0.2: (1.0, 0.8, 1.6 / 3, 0.4), 0.5: (1.0,) * 4, 0.0: (0.0,) * 4}[progress]
    return lambda gate, h, u, sublayer: h + weights[(sublayer - 1) // 2] * u


def completep(weight):
    return lambda gate, h, u, sublayer: h + weight * u


def oru(gate, h, u, sublayer):
    return h + u - np.sum(h * u, -1, keepdims=True) / np.sum(h**2, -1, keepdims=True) * h


CASES = {
    "keel": (find_scheme("keel")(), keel, 1.0),
    "prores": (find_scheme("prores")(ramp=0.5), prores(0.2), 0.2),
    "prores_start": (find_scheme("prores")(ramp=0.5), prores(0.0), 0.0),
    "prores_over": (find_scheme("prores")(ramp=0.5), prores(0.5), 0.5),
    "completep": (find_scheme("completep")(), completep(0.5), 1.0),
    "completep_root": (find_scheme("completep")(base_depth=1, exponent=0.5), completep(0.5), 1.0),
    "completep_shallow": (find_scheme("completep")(base_depth=16), completep(4.0), 1.0),
    "oru": (find_scheme("oru")(), oru, 1.0),
}


@pytest.mark.parametrize("case", CASES)
def test_pre_norm_readers(case):
    scheme, commit, progress = CASES[case]
    embedding, updates, table = inputs()
    stack = build(scheme, width=WIDTH, sublayers=SUBLAYERS)
    h = embedding.astype(np.float64)
    for done, stream in enumerate(streams(stack, embedding, updates, progress)):
        h = commit(stack.gates[done - 1], h, updates[done - 1].astype(np.float64), done) if done else h
        read = wide(stack.entries[done].gain) * unit(h)
        assert_rows_close(stream.hidden, h)
        assert_rows_close(scheme.read(stream), read)
    hidden, log_scale = scheme.close(stream, stack.ends)
    assert_rows_close(unembed(hidden, log_scale, scheme.head_rows(jnp.asarray(table))), read @ table.T, terms=WIDTH)


def test_ngpt():
    """In the source's scale: states and rows of length 1, the head's product times s_z."""
    scheme = find_scheme("ngpt")(start=0.1)
    embedding, updates, table = inputs()
    stack = build(scheme, width=WIDTH, sublayers=SUBLAYERS)
    length = lambda x: x / np.linalg.norm(x, axis=-1, keepdims=True)  # noqa: E731
    h = length(embedding.astype(np.float64))
    for done, stream in enumerate(streams(stack, embedding, updates)):
        if done:
            alpha = np.abs(wide(stack.gates[done - 1].scale)) * 0.1 * np.sqrt(WIDTH)
            h = length(h + alpha * (length(updates[done - 1].astype(np.float64)) - h))
        assert_rows_close(scheme.read(stream), np.sqrt(WIDTH) * h)
    rows = scheme.constrain(jnp.asarray(table), ("vocab", "embed"), "embedding")
    logits = wide(stack.ends.scale) * np.sqrt(WIDTH) * (h @ length(table.astype(np.float64)).T)
    assert_rows_close(unembed(*scheme.close(stream, stack.ends), scheme.head_rows(rows)), logits, terms=WIDTH)


def test_ngpt_starts_where_the_source_does():
    scheme = find_scheme("ngpt")()
    gate, ends = scheme.gate(WIDTH, SublayerIndex(3, SUBLAYERS), None), scheme.ends(WIDTH, 1.0, None)
    np.testing.assert_allclose(gate.scale[...], WIDTH**-0.5)
    assert_close(gate(scheme.start, WIDTH), 0.05, terms=1, chain=4)
    assert_close(ends(1.0, WIDTH), 1.0, terms=1, chain=4)
    stack = build(scheme, width=WIDTH, sublayers=1, moved=0.0)
    embedding, updates, _ = inputs()
    start = streams(stack, embedding, updates[:0])[0]
    after, shown = scheme.advance(start, jnp.zeros_like(start), boundary(stack, 1))
    assert_close(after, start, terms=1, chain=4)  # Norm takes back that an update of nothing shrinks
    assert_close(shown, jnp.full((1, 1, WIDTH), 0.05), terms=1, chain=4)


def assert_on_the_sphere(blueprint, params) -> int:
    """How many parameters lie there: all hidden matrices and tables, along the embedding axis."""
    known = jax.tree.leaves(blueprint.parameters)
    kept = [
        (np.asarray(value), p) for value, p in zip(jax.tree.leaves(params), known, strict=True) if "embed" in p.axes
    ]
    kept = [(value, p.axes) for value, p in kept if p.role in ("matrix", "embedding", "head")]
    for value, axes in kept:
        squares = np.sum(np.square(value, dtype=np.float64), axis=axes.index("embed") - len(axes))
        assert_close(squares, 1.0, terms=1, chain=4)
    assert len(kept) == sum(p.role in ("matrix", "embedding", "head") for p in known)
    return len(kept)


def test_ngpt_stays_on_the_sphere_of_eight_devices_and_resumes_bit_for_bit(tmp_path):
    scheme, mesh = find_scheme("ngpt")(), (2, 2, 2)
    blueprint, step = tiny.blueprint(tiny.run_config(scheme), *mesh), tiny.step_of(scheme, mesh)
    start = jax.device_get(tiny.created(scheme))
    assert assert_on_the_sphere(blueprint, start.params) == 9  # seven matrices of a block, two tables
    batch = lambda seed: jax.device_put(tiny.packed_batch(seed), batch_sharding(blueprint.mesh))  # noqa: E731
    state, _ = step(jax.device_put(start, blueprint.shardings()), batch(0))
    moved = jax.device_get(state.params)
    assert_on_the_sphere(blueprint, moved)
    far = jax.tree.map(lambda old, new: np.max(np.abs(new - old)), start.params, moved)
    assert min(jax.tree.leaves(far)) > 1e-5
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(1, state)
    went_on, _ = step(state, batch(1))
    with Checkpoints(tmp_path) as checkpoints:
        resumed, _ = step(checkpoints.restore(blueprint.abstract(), 1), batch(1))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(resumed), jax.device_get(went_on))
    assert_on_the_sphere(blueprint, jax.device_get(resumed.params))


def test_ngpt_leaves_gains_biases_and_gates_where_they_are():
    scheme = find_scheme("ngpt")()
    block = BlockConfig(biases=("qkv", "out", "mlp"), qk_gain="head")
    config = tiny.run_config(scheme, tied=True, positions="learned", mlp="gelu", block=block)
    blueprint = tiny.blueprint(config)
    noise = np.random.default_rng(0)
    before = jax.tree.map(lambda p: jnp.asarray(noise.standard_normal(p.shape), jnp.float32), blueprint.parameters)
    after = blueprint.constrained(before)
    assert assert_on_the_sphere(blueprint, after) == 8  # six matrices of a block, tokens and positions
    roles = jax.tree.map(lambda p: p.role, blueprint.parameters)
    same = jax.tree.map(lambda old, new: np.array_equal(old, new), before, after)
    for role, unmoved in zip(jax.tree.leaves(roles), jax.tree.leaves(same), strict=True):
        assert unmoved == (role in ("norm", "gate"))


def test_completep_s_rate_knows_the_depth_by_its_exponent():
    rates = lambda exponent: [  # noqa: E731
        find_scheme("completep")(exponent=exponent).default_rate(128, depth) for depth in (2, 8, 32)
    ]
    np.testing.assert_allclose(rates(1.0), 4e-3)
    np.testing.assert_allclose(rates(0.5), [4e-3, 2e-3, 1e-3])
    np.testing.assert_allclose(rates(0.0), [4e-3, 1e-3, 2.5e-4])


def test_prores_without_its_ramp_is_what_a_finished_model_is():
    scheme = find_scheme("prores")(ramp=1.0)
    assert scheme.trained() == dataclasses.replace(scheme, ramp=0.0)
    embedding, updates, _ = inputs()
    stack = build(scheme, width=WIDTH, sublayers=SUBLAYERS)
    finished = streams(stack, embedding, updates, 1.0)
    for other, progress in ((scheme.trained(), 0.0), (find_scheme("plain")(), 0.0)):
        again = streams(stack._replace(scheme=other), embedding, updates, progress)
        jax.tree.map(np.testing.assert_array_equal, again, finished)


def test_oru_writes_only_across():
    embedding, updates, _ = inputs()
    stack = build(find_scheme("oru")(), width=WIDTH, sublayers=SUBLAYERS)
    seen = [np.asarray(stream.hidden, np.float64) for stream in streams(stack, embedding, updates)]
    for before, after in zip(seen, seen[1:], strict=False):
        cosine = np.sum((after - before) * before, -1) / np.linalg.norm(after - before, axis=-1)
        np.testing.assert_allclose(cosine / np.linalg.norm(before, axis=-1), 0.0, atol=1e-6)
        assert np.all(np.linalg.norm(after, axis=-1) > np.linalg.norm(before, axis=-1))


@pytest.mark.parametrize(
    ("name", "options", "named"),
    [
        ("keel", {"epsilon": 0.0}, "scheme.epsilon = 0.0"),
        ("prores", {"ramp": 1.2}, "scheme.ramp = 1.2: give a number from 0 to 1"),
        ("prores", {"ramp": -0.1}, "scheme.ramp"),
        ("completep", {"base_depth": 0}, "scheme.base_depth = 0"),
        ("completep", {"exponent": 2.0}, "scheme.exponent = 2.0"),
        ("ngpt", {"start": 0.0}, "scheme.start = 0.0"),
        ("oru", {"epsilon": 1.0}, "scheme.epsilon = 1.0"),
    ],
    ids=["keel", "prores_long", "prores_negative", "completep_depth", "completep_exponent", "ngpt", "oru"],
)
def test_options_that_cannot_be(name, options, named):
    with pytest.raises(UserError, match=named):
        find_scheme(name)(**options)
