"""The head's loss in chunks: the same numbers as from all logits at once, on any mesh, and never all logits."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from nagjax.layers.embedding import unembed
from nagjax.model.config import ModelConfig
from nagjax.model.transformer import Output
from nagjax.residual import find_scheme
from nagjax.runs.config import MeshConfig
from nagjax.train import head_loss as head_loss_module
from nagjax.train.abstract_step import abstract_batch
from nagjax.train.distributed.mesh import batch_sharding, make_mesh, row_axes
from nagjax.train.head_loss import FEWEST, LOGITS, by_token, chunk_tokens, head_loss
from nagjax.train.loss import cross_entropy
from nagjax.train.step import jit_eval_step, jit_train_step
from pallas_kernels import hlo
from pallas_kernels.placement import shard_rows
from tests import tiny
from tests.tolerance import assert_close

WIDTH, BATCH, TOKENS = 16, 8, 8


@dataclasses.dataclass
class Table:
    """A model that consists only of its head."""

    table: jax.Array
    config: ModelConfig = ModelConfig()

    def head_rows(self):
        return self.table

    def logits(self, output):
        return unembed(output.hidden, output.log_scale, self.table, self.config.logit_softcap)


def problem(vocab: int, dtype):
    """Hidden states, log-scales and a table; the batch has padding, and targets that two ids are equally likely for."""
    noise = np.random.default_rng(vocab)
    hidden = noise.standard_normal((BATCH, TOKENS, WIDTH)).astype(np.float32)
    table = noise.standard_normal((vocab, WIDTH)).astype(np.float32)
    table[vocab - 2] = table[1]
    hidden[0, 0] = table[1]
    batch = tiny.packed_batch(vocab=vocab)
    batch.targets[0, 0] = 1
    log_scale = 0.3 * noise.standard_normal((BATCH, TOKENS)).astype(np.float32)
    return (jnp.asarray(hidden, dtype), jnp.asarray(log_scale), jnp.asarray(table)), batch


def both(z_weight: float, chunk: int, mesh=None, cap=None):
    """The objective with its gradients, and the sums: from all logits, and in chunks on a mesh."""

    config = ModelConfig(logit_softcap=cap)

    def whole(parts, batch):
        sums = cross_entropy(Table(parts[2], config).logits(Output(*parts[:2], None, None)), batch)
        return sums.nats + z_weight * sums.z, sums

    def chunked(parts, batch):
        output = Output(*parts[:2], None, None)
        return head_loss(Table(parts[2], config), output, batch, z_weight=z_weight, chunk=chunk)

    run = lambda loss: jax.value_and_grad(lambda parts, batch: loss(parts, batch), has_aux=True)  # noqa: E731
    spread = shard_rows(run(chunked), mesh, row_axes(mesh)) if mesh else run(chunked)
    value = shard_rows(chunked, mesh, row_axes(mesh)) if mesh else chunked
    return jax.jit(run(whole)), jax.jit(spread), jax.jit(value)


# Chunks that divide the tokens of a device and that do not; vocabularies that the tensor axis divides and that it
# does not; widths likewise by fsdp.
@pytest.mark.parametrize(
    "mesh, vocab, chunk, dtype",
    [
        (None, 48, 16, jnp.float32),
        (None, 37, 9, jnp.float32),
        (None, 48, 9, jnp.bfloat16),
        ((2, 2, 2), 48, 3, jnp.float32),
        ((2, 2, 2), 37, 16, jnp.float32),
        ((1, 2, 2, 2), 48, 5, jnp.float32),
        ((1, 8), 48, 3, jnp.bfloat16),
        ((1, 1, 8), 48, 10, jnp.float32),
    ],
)
def test_chunks_are_the_whole(mesh, vocab, chunk, dtype):
    parts, batch = problem(vocab, dtype)
    plain, chunked, value = both(0.1, chunk, make_mesh(MeshConfig(*mesh)) if mesh else None)
    (want, sums), by = plain(parts, batch)
    (got, found), by_chunks = chunked(parts, batch)
    # A sum over tokens of sums over features and vocabulary.
    close = {"terms": BATCH * TOKENS, "chain": 4}
    assert_close((got, tuple(found)), (want, tuple(sums)), **close)
    assert_close(value(parts, batch), (want, sums), **close)
    assert found.correct == sums.correct and 0 < sums.count < BATCH * TOKENS
    # In bfloat16 the gradient of each logit is rounded, and what is summed of them keeps that relative error.
    close = close if dtype == jnp.float32 else {"terms": 1, "chain": 4, "dtype": dtype}
    for one, other in zip(by_chunks, by, strict=True):
        assert one.dtype == other.dtype and np.any(np.asarray(other, float))
        assert_close(one, other, **close)


@pytest.mark.parametrize("limit", [3 * BATCH * 40, 5 * BATCH * 40, 1])
def test_numbers_by_token_in_pieces(limit, monkeypatch):
    """Of pieces that do not fit into the text evenly, and of single tokens; never with more logits than the limit."""
    (hidden, log_scale, table), batch = problem(40, jnp.float32)
    model, output, seen = Table(table), Output(hidden, log_scale, None, None), []

    def of(logits, targets):
        seen.append(logits.size)
        own = jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
        return own, jnp.argmax(logits, axis=-1)[: BATCH // 2]

    whole = jax.jit(lambda: by_token(of, model, output, batch.targets))()
    monkeypatch.setattr(head_loss_module, "LOGITS", limit)
    pieces = jax.jit(lambda: by_token(of, model, output, batch.targets))()
    assert_close(pieces[0], whole[0], **tiny.FORWARD)
    np.testing.assert_array_equal(pieces[1], whole[1])
    assert seen[0] == BATCH * TOKENS * 40 and max(seen[1:]) <= max(limit, BATCH * 40)


@pytest.mark.parametrize("mesh", [None, (2, 2, 2)])
def test_chunks_of_limited_logits(mesh):
    parts, batch = problem(48, jnp.float32)
    plain, chunked, value = both(0.1, 5, make_mesh(MeshConfig(*mesh)) if mesh else None, cap=2.0)
    want, got = plain(parts, batch), chunked(parts, batch)
    assert_close(jax.tree.leaves(got), jax.tree.leaves(want), terms=BATCH * TOKENS, chain=4)
    assert_close(value(parts, batch)[0], want[0][0], terms=BATCH * TOKENS, chain=4)
    free, _ = both(0.1, 5)[0](parts, batch)
    assert abs(float(free[0] - want[0][0])) > 1.0


def test_of_equals_the_first_is_the_guess():
    (hidden, log_scale, table), batch = problem(48, jnp.float32)
    weights = np.zeros_like(batch.weights)
    weights[0, 0] = 1.0
    for target, want in ((1, 1.0), (46, 0.0)):
        batch.targets[0, 0] = target
        for mesh in (None, make_mesh(MeshConfig(data=1, tensor=8))):
            *_, value = both(0.0, 3, mesh)
            _, sums = value((hidden, log_scale, table), batch._replace(weights=weights))
            assert sums.correct == want and sums.count == 1.0


def test_the_size_of_a_chunk():
    assert chunk_tokens(16_384, 256) == 16_384, "small logits stay whole"
    assert chunk_tokens(16_384, 32_768) == LOGITS // 32_768 == 2048
    assert chunk_tokens(16_384, 131_072) == chunk_tokens(16_384, 262_144) == FEWEST
    assert chunk_tokens(100, 131_072) == 100


MESH, CONTEXT, VOCAB = (2, 2, 2), 32, 512


@pytest.fixture(scope="module")
def steps():
    """On eight devices, the batch in two parts: whole logits and chunks of 4 tokens."""

    def step(chunk: int):
        train = {"loss_chunk": chunk, "accumulate": 2, "z_loss": 0.1}
        model = {"depth": 2, "context": CONTEXT, "vocab": VOCAB, "tied": True}
        config = tiny.run_config(find_scheme("plain")(), train=train, **model)
        bp = tiny.blueprint(config, *MESH)
        return bp, jit_train_step(bp).lower(bp.abstract(), abstract_batch(bp)).compile()

    return step(CONTEXT * tiny.BATCH), step(4)


def test_a_step_in_chunks_is_the_step(steps):
    seen = []
    batch = tiny.packed_batch(tokens=CONTEXT, vocab=VOCAB)
    (bp, _), _ = steps
    start = tiny.fresh(bp)
    start = jax.device_get(start._replace(step=jnp.int32(50), params=tiny.moved(start.params)))
    for bp, compiled in steps:
        state = jax.device_put(start, bp.shardings())
        new, metrics = compiled(state, jax.device_put(batch, batch_sharding(bp.mesh)))
        seen.append(jax.device_get((optax.tree_utils.tree_get(new.optimizer, "mu"), tuple(metrics))))
    (want, told), (got, found) = seen
    assert_close(got, want, **tiny.STEP)
    assert_close(found, told, **tiny.STEP)


def test_logits_are_neither_kept_nor_gathered(steps):
    """Of what a device holds along the vocabulary nothing is larger than its part of the table, and no collective
    carries the vocabulary's split dimension whole."""
    tokens = tiny.BATCH * CONTEXT // 2 // 4  # of a part on a device
    width = 16
    assert tokens > width

    def largest(compiled) -> int:
        shapes = [tuple(map(int, found.split(","))) for found in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())]
        return max(int(np.prod(shape)) for shape in shapes if VOCAB // 2 in shape)

    (_, whole), (_, chunked) = steps
    assert largest(whole) >= tokens * VOCAB // 2, "the measure sees logits"
    assert largest(chunked) <= width * VOCAB // 2
    needed, less = (compiled.memory_analysis().temp_size_in_bytes for _, compiled in steps)
    assert needed - less >= 4 * tokens * VOCAB // 2
    program = hlo.parse(chunked.as_text())
    for home in program.computations.values():
        for one in home.instructions:
            assert not (one.opcode.startswith("all-gather") and re.search(rf"f32\[[\d,]*\b{VOCAB}\b", one.type)), one


def test_evaluation_in_chunks():
    config = tiny.run_config(find_scheme("nag")(), depth=2)
    sums = []
    for chunk in (None, 5):
        chosen = dataclasses.replace(config, train=dataclasses.replace(config.train, loss_chunk=chunk))
        bp = tiny.blueprint(chosen)
        params = tiny.fresh(bp).params
        batch = jax.device_put(tiny.packed_batch(), batch_sharding(bp.mesh))
        sums.append(jit_eval_step(bp)(params, {}, jnp.int32(3), batch, jnp.ones(tiny.VOCAB)).sums)
    assert_close(tuple(sums[1]), tuple(sums[0]), **tiny.FORWARD)
