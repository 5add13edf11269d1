"""What the Transformer, Mixture-of-Depths and telemetry require of a scheme, checked for every scheme."""

import dataclasses
import functools
import inspect
import json
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nagjax.layers.attention import Where
from nagjax.mod.routed import ForwardContext
from nagjax.model.transformer import Observe, Transformer
from nagjax.residual import Boundary
from nagjax.residual.module import Residual
from nagjax.residual.protocol import telemetry
from nagjax.residual.registry import find_scheme, schemes
from nagjax.runs.config import RunConfig, from_dict, to_dict
from tests import tiny
from tests.own_models import residual_of, table_of
from tests.tolerance import assert_close

TELEMETRY = {"turn", "ratio", "growth", "log_norm", "gate", "closed"}
ROLES = {"matrix", "embedding", "head", "norm", "gate"}


def test_name_title_and_docstring(scheme):
    cls = type(scheme)
    assert find_scheme(cls.name) is cls
    assert Path(inspect.getfile(cls)).stem == cls.name
    assert cls.title and [c.title for c in schemes().values()].count(cls.title) == 1
    assert cls.learning_rate > 0 and 0 < cls.gate_rate <= 1
    assert len(cls.__doc__) > 40 and dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen


def test_config_round_trip(scheme):
    config = tiny.run_config(scheme, optimizer={"lr": 3e-3}, train={"log": ("wandb",)}, mlp="gelu")
    assert from_dict(RunConfig, json.loads(json.dumps(to_dict(config)))) == config
    hash(config)


@functools.cache
def model_of(scheme) -> Transformer:
    model = Transformer(tiny.model_config(), scheme, nnx.Rngs(0))
    graph, params = nnx.split(model)
    return nnx.merge(graph, tiny.moved(params, 0.1))


class Passed(NamedTuple):
    """What one program makes of a batch."""

    logits: jax.Array
    hidden: jax.Array
    telemetry: dict[str, jax.Array]


@functools.cache
def forward(scheme) -> tuple[Passed, Passed]:
    """Of packed rows with padding, and of whole ones."""
    graph, params = nnx.split(model_of(scheme))

    @jax.jit
    def run(params, tokens, where):
        model = nnx.merge(graph, params)
        output = model(tokens, where, observed=True)
        return Passed(model.logits(output), output.hidden, output.telemetry)

    batch = tiny.packed_batch()
    whole = Where(*map(np.asarray, Where.whole(*batch.tokens.shape)))
    return run(params, batch.tokens, batch.where), run(params, batch.tokens, whole)


@jax.jit
def attend(branch, x, where):
    return branch(x, where)[0]


@jax.jit
def think(branch, x, where):
    return branch(x)


def test_scan_equals_unrolled_with_telemetry_of_every_sublayer(scheme):
    """Calls the scheme's methods sublayer after sublayer, each with its own parameters."""
    model, batch = model_of(scheme), tiny.packed_batch()
    logits, _, depth = forward(scheme)[0]
    assert logits.shape == (tiny.BATCH, tiny.TOKENS, tiny.VOCAB) and logits.dtype == jnp.float32
    assert set(depth) == TELEMETRY
    assert all(v.shape == (model.config.sublayers,) and v.dtype == jnp.float32 for v in depth.values())

    blocks = [jax.tree.map(lambda x, i=i: x[i], model.blocks) for i in range(model.config.depth)]
    sublayers = [part for block in blocks for part in (block.attention, block.mlp)]
    entries = [sublayer.entry for sublayer in sublayers] + [model.entry]

    @jax.jit
    def open_(embedding):
        stream = scheme.open(embedding, boundary(None, entries[0], 0, 1), model.ends)
        return stream, scheme.read(stream)

    def boundary(gate, entry, index, following):
        return Boundary(gate, entry, jnp.int32(index), jnp.int32(following), jnp.float32(1.0), len(sublayers))

    @jax.jit
    def commit(stream, update, *at):
        after, gate = scheme.advance(stream, update, boundary(*at))
        return after, scheme.read(after), telemetry(scheme, stream, after, gate, batch.segment_ids > 0)

    (stream, x), notes = open_(model.embedding(batch.tokens, batch.where, jnp.float32)), []
    for index, sublayer in enumerate(sublayers, 1):
        following = index + 1 if index < len(sublayers) else 0
        update = (attend if index % 2 else think)(sublayer.branch, x, batch.where)
        stream, x, note = commit(stream, update, sublayer.gate, entries[index], index, following)
        notes.append(note)
    hidden, log_scale = scheme.close(stream, model.ends)
    unrolled = np.exp(log_scale)[..., None] * np.asarray(hidden, float) @ np.asarray(model.head_rows(), float).T
    assert_close(logits, unrolled, **tiny.FORWARD)
    for name, values in depth.items():
        assert_close(values, [n[name] for n in notes], **tiny.FORWARD, scale=1.0, err_msg=name)
    assert np.all(depth["turn"] > 0) and np.all(depth["closed"] >= 0) and np.all(depth["closed"] <= 1)


def test_the_module_around_the_same_branches_is_the_transformer(scheme):
    """For `nagjax.NAG` and the other modules: the parameters are ordered differently, the implementation is one. That a
    call of the module is such a scan: tests/residual/test_module.py."""
    model, tokens = model_of(scheme), tiny.packed_batch().tokens
    where = Where.whole(*tokens.shape)  # no padding, which the model's telemetry leaves out and the module cannot know

    @jax.jit
    def run(residual, model):
        def step(stream, xs):
            (first, second), block = [jax.tree.map(lambda x, j=j: x[j], xs[0]) for j in (0, 1)], xs[1]
            update = attend(block.attention.branch, residual.read(stream), where)
            stream, of_attention = residual.observe(stream, update, first)
            stream, of_mlp = residual.observe(stream, block.mlp.branch(residual.read(stream)), second)
            return stream, jax.tree.map(lambda *each: jnp.stack(each), of_attention, of_mlp)

        pairs = jax.tree.map(lambda x: x.reshape(-1, 2, *x.shape[1:]), residual.slots())
        stream = residual.open(model.embedding(tokens, where, jnp.float32), 1.0)
        stream, facts = jax.lax.scan(step, stream, (pairs, model.blocks))
        return residual.logits(stream, table_of(model)), residual.close(stream), facts

    logits, hidden, facts = run(residual_of(model), model)
    want = forward(scheme)[1]
    assert_close(logits, want.logits, **tiny.FORWARD)
    assert_close(hidden, want.hidden, **tiny.FORWARD)
    for name, values in want.telemetry.items():
        assert_close(np.ravel(facts[name]), values, **tiny.FORWARD, scale=1.0, err_msg=name)


def test_advance_is_per_token(scheme):
    """Any subset of rows, in any order, advances as it does among all rows."""
    model = model_of(scheme)
    block = jax.tree.map(lambda x: x[1], model.blocks)
    at = Boundary(
        block.attention.gate, block.mlp.entry, jnp.int32(3), jnp.int32(4), jnp.float32(1.0), model.config.sublayers
    )
    embedding, update = jax.random.normal(jax.random.key(0), (2, 2, 6, model.config.width))
    stream = scheme.open(embedding, at._replace(gate=None), model.ends)
    assert all(leaf.shape[:2] == (2, 6) for leaf in jax.tree.leaves(stream))
    assert scheme.read(stream).shape == embedding.shape
    advance = jax.jit(lambda stream, update: scheme.advance(stream, update, at))
    after, gate = advance(stream, update)
    assert jax.tree.structure(after) == jax.tree.structure(stream)
    jax.tree.map(lambda a, b: (a.shape, a.dtype) == (b.shape, b.dtype) or 1 / 0, after, stream)
    np.broadcast_shapes(gate.shape, update.shape)
    longer, _ = advance(stream, 3.0 * update)
    moved = [np.abs(a - b).max() for a, b in zip(jax.tree.leaves(longer), jax.tree.leaves(after), strict=True)]
    assert (max(moved) < 1e-4) == scheme.scale_free

    chosen = np.array([4, 0, 3])
    take = lambda x: x.reshape(12, *x.shape[2:])[chosen * 2][None]  # noqa: E731
    picked, _ = advance(jax.tree.map(take, stream), take(update))
    jax.tree.map(lambda got, want: assert_close(got, take(want), terms=16, chain=4), picked, after)


@pytest.mark.parametrize("x, update", [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)])
def test_the_stream_keeps_its_dtype_whatever_that_of_an_update_is(scheme, x, update):
    """A Flax layer that reads bfloat16 returns float32 unless it is told otherwise."""

    def run(x):
        own = Residual(scheme, 16, 2, rngs=nnx.Rngs(0))
        before = own.open(x, 0.5)
        return before, own.advance(before, own.read(before).astype(update), 1)

    before, after = jax.eval_shape(run, jax.ShapeDtypeStruct((2, 3, 16), x))
    assert before == after and before.lead == (2, 3)


def test_lanes_are_a_direction_and_a_log_norm(scheme):
    model = model_of(scheme)
    first = jax.tree.map(lambda x: x[0], model.blocks.attention.entry)
    at = Boundary(None, first, jnp.int32(0), jnp.int32(1), jnp.float32(1.0), model.config.sublayers)
    stream = scheme.open(3.0 * jax.random.normal(jax.random.key(0), (2, 6, 16), jnp.bfloat16), at, model.ends)
    direction, log_norm = scheme.lanes(stream)
    assert direction.dtype == log_norm.dtype == jnp.float32 and log_norm.shape == (2, 6)
    assert_close(np.mean(direction**2, -1), 1.0, terms=16)


def test_telemetry_costs_nothing_when_off(scheme):
    """The block has as many instructions, before the compiler could leave any out, as one whose scheme computes nothing
    for telemetry."""

    class Muted(type(scheme)):
        def advance(self, stream, update, at):
            return super().advance(stream, update, at)[0], jnp.ones((1, 1, 1))

    muted = Muted(**{f.name: getattr(scheme, f.name) for f in dataclasses.fields(scheme)})
    where = Where.whole(2, 4)

    def instructions(scheme, observed):
        graph, params = nnx.split(jax.tree.map(lambda x: x, model_of(scheme)))

        def block(params, tokens):
            model = nnx.merge(graph, params)
            layer = jax.tree.map(lambda x: x[0], model.layers())
            first = jax.tree.map(lambda x: x[0], model.blocks.attention.entry)
            at = Boundary(None, first, jnp.int32(0), jnp.int32(1), jnp.float32(1.0), model.config.sublayers)
            stream = scheme.open(model.embedding(tokens, where, jnp.float32), at, model.ends)
            ctx = ForwardContext(where, jnp.float32(1.0), jnp.uint32(0), causal=False)
            return model.step(stream, layer, ctx, observe=Observe(observed))

        return jax.jit(block).lower(params, jnp.zeros((2, 4), jnp.int32)).as_text().count(" = ")

    off = instructions(scheme, False)
    assert off == instructions(muted, False)
    if scheme.name in ("plain", "nag"):
        assert off < instructions(scheme, True)


def test_parameters_have_known_roles_and_axes(scheme):
    parameters = jax.tree.leaves(tiny.blueprint(tiny.run_config(scheme)).parameters)
    assert {p.role for p in parameters} <= ROLES
    for p in parameters:
        assert len(p.axes) <= len(p.shape) and len(p.shape) - len(p.axes) <= 1
