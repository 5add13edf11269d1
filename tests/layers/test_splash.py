"""Splash attention, interpreted, is attention by XLA: for queries that are some of the tokens, for windows, where keys
are hidden, and on meshes. The kernels themselves are compiled for a TPU in tests/aot."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel
from jax.sharding import NamedSharding

from nagjax.errors import UserError
from nagjax.layers.attend import attend
from nagjax.layers.flash import seen_keys
from nagjax.layers.platform import tracing_for
from nagjax.layers.splash import _table, _visited
from nagjax.layers.where import Where, seen_mask
from nagjax.mod import ModConfig
from nagjax.mod.cache import HIDDEN
from nagjax.model.transformer import Transformer
from nagjax.residual import find_scheme
from nagjax.residual.rows import take
from nagjax.runs.config import MeshConfig
from nagjax.train.distributed.mesh import make_mesh, row_axes
from pallas_kernels import shard_rows
from tests import tiny
from tests.tolerance import assert_close

BATCH, TOKENS, HEADS, KEY_HEADS, WIDTH = 2, 384, 4, 2, 16  # in three blocks


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    make = functools.partial(splash_attention_kernel.make_splash_mha, interpret=True)
    monkeypatch.setattr(splash_attention_kernel, "make_splash_mha", make)


def packed() -> Where:
    """Documents within a block and over several; padding behind those of the second row."""
    lengths = (100, 284), (20, 300, 64)
    segments = np.stack([np.repeat((1, 2, 0)[: len(own)], own) for own in lengths])
    positions = np.stack([np.concatenate([*map(np.arange, own)]) for own in lengths])
    return Where(jnp.asarray(segments, jnp.int32), jnp.asarray(positions, jnp.int32))


def some(count: int) -> Where:
    """The tokens that a router might choose."""
    noise = np.random.default_rng(1)
    return take(packed(), jnp.asarray(np.stack([np.sort(noise.permutation(TOKENS)[:count]) for _ in range(BATCH)])))


def hidden() -> tuple[Where, Where]:
    """All tokens, of which some are hidden from the others."""
    ran = np.random.default_rng(2).random((BATCH, TOKENS)) < 0.5
    return packed(), Where(jnp.where(ran, packed().segments, HIDDEN), packed().positions)


def outputs(implementation, queries: Where, keys: Where, window=None, mesh=None):
    """The output of attention for queries whose own key is seen, and the gradients of its inputs."""
    (count, known), noise = (where.segments.shape[1] for where in (queries, keys)), np.random.default_rng(0)
    shapes = (count, HEADS), (known, KEY_HEADS), (known, KEY_HEADS), (count, HEADS)
    *given, weights = (noise.standard_normal((BATCH, *shape, WIDTH)).astype(np.float32) for shape in shapes)
    counts = True if count < known else (queries.segments == keys.segments)[..., None, None]

    def loss(q, k, v):
        mixed = attend(q, k, v, queries, keys, implementation, window) * counts
        return jnp.sum(mixed * weights), mixed

    run = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)
    if mesh is not None:
        rows = row_axes(mesh)
        run, given = shard_rows(run, mesh, rows), [jax.device_put(x, NamedSharding(mesh, rows)) for x in given]
    (_, mixed), grads = jax.device_get(jax.jit(run)(*given))
    return mixed, *grads


def check(got, want):
    for one, other, chain in zip(got, want, (3, 6, 6, 6), strict=True):
        assert_close(one, other, terms=TOKENS, chain=chain)


CASES = {
    "padded": (lambda: (some(100), packed()), None),
    "all_window": (lambda: (packed(), packed()), 150),
    "selected_window": (lambda: (some(256),) * 2, 70),
    "hidden": (hidden, None),
}


@pytest.mark.parametrize("case", CASES)
def test_it_is_attention_by_xla(case):
    tokens, window = CASES[case]
    check(outputs("splash", *tokens(), window), outputs("xla", *tokens(), window))


def test_a_window_that_the_program_gets():
    """As where blocks have windows of their own."""
    given = some(100), packed()
    check(outputs("splash", *given, jnp.int32(70)), outputs("xla", *given, 70))


@pytest.mark.parametrize(
    ("axes", "count", "window"),
    [(dict(data=2, tensor=2), 100, None), (dict(tensor=4), 256, None), (dict(data=2, sequence=3), TOKENS, 70)],
    ids=["heads", "too_few_heads", "tokens"],
)
def test_a_mesh_changes_nothing(axes, count, window):
    queries = some(count)
    mesh = make_mesh(MeshConfig(**dict(data=1) | axes), jax.devices()[: int(np.prod([*axes.values()]))])
    check(outputs("splash", queries, packed(), window, mesh), outputs("xla", queries, packed(), window))


@functools.cache
def logits(attention: str, kv: str, causal: bool):
    """Of a model that chooses among tokens by chance."""
    mod = ModConfig(rate=(0.5 if kv == "selected" else 0.6,), kv=kv, router="random")
    config = tiny.model_config(depth=2, context=256, mod=mod, attention=attention)
    graph, params = nnx.split(Transformer(config, find_scheme("nag")(), nnx.Rngs(0)))
    batch = tiny.packed_batch(tokens=256, batch=BATCH)

    @jax.jit
    def run(params):
        model = nnx.merge(graph, params)
        return model.logits(model(batch.tokens, batch.where, causal=causal, cuts=jnp.full(4, 0.5)))

    return run(tiny.moved(params, 0.3))[batch.segment_ids > 0]


@pytest.mark.parametrize(
    "kv, causal",
    [("all", False), ("selected", False), ("selected", True)],
    ids=["by_capacity-all", "by_capacity-selected", "by_decider-selected"],
)
def test_a_routed_model(kv, causal):
    assert_close(logits("splash", kv, causal), logits("xla", kv, causal), terms=256, chain=tiny.FORWARD["chain"])


@pytest.mark.parametrize("window", [None, 70])
def test_no_block_without_a_key_that_is_seen_is_visited(window):
    """They are a stretch here. Both tables name the blocks to hold: where none is visited, the nearest."""
    queries, keys = some(256), packed()
    seen = np.asarray(seen_mask(queries, keys, window))[:, 0]
    held = seen.reshape(BATCH, 2, 128, 3, 128).any((2, 4))
    visited = _visited(*seen_keys(queries, keys, window), TOKENS, 128, 128)
    np.testing.assert_array_equal(visited, held)
    assert not held.all()
    for axis, count in ((1, 2), (2, 3)):
        table = {name: np.asarray(x[0]) for name, x in _table(visited, axis).items()}
        shape = (BATCH, 2, 3) if axis == 2 else (2, BATCH, 3)
        block, by_row = (table[name].reshape(shape) for name in ("data_next", "block_mask"))
        block, by_row = (x if axis == 2 else x.swapaxes(0, 1) for x in (block, by_row))
        np.testing.assert_array_equal(by_row, held)
        for row, i, j in np.ndindex(held.shape):
            own, other = divmod(block[row, i, j], count), (i, j)[axis - 1]
            line = held[row, :, j] if axis == 1 else held[row, i]
            nearest = min(np.flatnonzero(line), key=lambda at: abs(at - other), default=other)
            assert own == (row, nearest)


@pytest.mark.parametrize("window", [None, 70])
def test_auto_takes_it_on_a_tpu(window):
    q, k = (jax.ShapeDtypeStruct((1, n, 4, 64), jnp.bfloat16) for n in (100, 256))
    with tracing_for("tpu"):
        run = lambda q, k: attend(q, k, k, Where.whole(1, 100), Where.whole(1, 256), "auto", window)  # noqa: E731
        assert "splash_mha_fwd" in str(jax.make_jaxpr(run)(q, k))


@pytest.mark.parametrize(
    ("queries", "keys", "window", "words"),
    [(100, 200, None, "of 128 keys"), (256, 128, None, "256 queries and 128 keys"), (2**20, 2**20, 4096, "window")],
)
def test_what_it_cannot_do_is_refused_by_name(queries, keys, window, words):
    q, k = (jax.ShapeDtypeStruct((1, n, 4, 64), jnp.bfloat16) for n in (queries, keys))
    q_where, k_where = (jax.eval_shape(functools.partial(Where.whole, 1, n)) for n in (queries, keys))
    run = lambda *given: attend(*given, "splash", window)  # noqa: E731
    with pytest.raises(UserError, match=f"attention = 'splash'.*{words}"):
        jax.eval_shape(run, q, k, k, q_where, k_where)
