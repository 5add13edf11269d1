"""Log-likelihoods of given continuations, by which question-answering benchmarks score a model."""

import functools
import math
from collections.abc import Callable, Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from nagjax.errors import UserError
from nagjax.layers.where import Where
from nagjax.runs.blueprint import Tree
from nagjax.runs.opening import OpenRun
from nagjax.train.distributed.mesh import batch_parts, for_every_process, pin_rows, row_axes
from nagjax.train.head_loss import by_token
from pallas_kernels.placement import shard_rows

STEP = 32  # texts are padded to this times a power of two: few lengths, few compilations


def continuation_scores(
    run: OpenRun,
    pairs: Sequence[tuple[Sequence[int], Sequence[int]]],
    *,
    batch: int = 8,
    watch: Callable[[Iterable[int]], Iterable[int]] = iter,
) -> list[tuple[float, bool]]:
    """For each pair of token ids (context, continuation), the log-probability of the continuation in nats, and whether
    greedy decoding would produce it. A pair longer than the model's context loses tokens at the beginning.

    Pairs of similar lengths share a batch of `batch` rows. With Mixture-of-Depths, the causal decider chooses which
    tokens run. Compiles once per length (32, 64, 128, ... tokens). On a mesh of several hosts all hosts must score the
    same pairs. `watch` passes the batches through, and may raise between them.

    Raises UserError for an empty context, a continuation longer than the model's context, an id outside the vocabulary,
    and a model that is not causal.
    """
    model = run.config.model
    model.check_causal("scoring continuations")
    for context, continuation in pairs:
        if not len(context):
            raise UserError("context", [], "give at least one token for the first one to be predicted from")
        if len(continuation) > model.context:
            fix = f"the model's context is {model.context}: score it in parts"
            raise UserError("continuation", f"{len(continuation)} tokens", fix)
        for i in (*context, *continuation):
            model.check_id("token", i)
    graph, mesh = run.blueprint.graph, run.blueprint.mesh
    parts = batch_parts(mesh.shape)
    batch = -(-batch // parts) * parts
    known = run.params, np.float32(run.progress), run.mod.get("cuts")
    options = {"graph": graph, "mesh": mesh if mesh.size > 1 else None}
    rows = [[*context, *continuation][-(model.context + 1) :] for context, continuation in pairs]
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]))
    found = []
    for start in watch(range(0, len(order), batch)):
        chosen = order[start : start + batch]
        length = padded(len(rows[chosen[0]]) - 1, model.context, mesh.shape["sequence"])
        ids, first = np.zeros((batch, length + 1), np.int32), np.full((2, batch), length + 1, np.int32)
        for place, i in enumerate(chosen):
            ids[place, : len(rows[i])] = rows[i]
            first[:, place] = len(rows[i]) - len(pairs[i][1]), len(rows[i])
        found.append(score_padded(*known, ids, *first, **options))
        found[-2:-1] = jax.device_get(found[-2:-1])  # one batch behind the devices, so that they never wait
    told = (row for batch in jax.device_get(found) for row in zip(*batch, strict=True))  # the last rows are padding
    scores = {i: (float(nats), bool(greedy)) for i, (nats, greedy) in zip(order, told, strict=False)}
    return [scores[i] for i in range(len(rows))]


def padded(tokens: int, context: int, parts: int = 1) -> int:
    """The length to which `tokens` are padded: 32 times a power of two, rounded up to a multiple of `parts`; at most
    the context."""
    length = STEP * 2 ** max(0, math.ceil(math.log2(max(tokens, 1) / STEP)))
    return min(-(-length // parts) * parts, context)  # `parts` divides the context, too


def _score(
    params: Tree,
    progress: Float[Array, ""],
    cuts: Float[Array, " S"] | None,
    ids: Int[Array, "B n"],
    first: Int[Array, " B"],
    end: Int[Array, " B"],
    *,
    graph: nnx.GraphDef,
    mesh: Mesh | None,
) -> tuple[Float[Array, " B"], Bool[Array, " B"]]:
    """The sum of the log-probabilities (nats) of the ids from `first` up to, but without, `end`, and whether each was
    the likeliest."""
    model = nnx.merge(graph, params)
    tokens, targets = ids[:, :-1], ids[:, 1:]
    where = Where.whole(*tokens.shape)
    where = where._replace(segments=(where.positions < end[:, None] - 1).astype(jnp.int32))
    options = {"pin": pin_rows(mesh)} if mesh else {}
    # As in generation: the deciders choose the tokens that run, and experts drop no choice, whatever else is in the
    # batch.
    output = model(tokens, where, progress=progress, cuts=cuts, causal=True, **options)
    own, likeliest = by_token(_told, model, output, targets)
    place = where.positions + 1
    counted = (place >= first[:, None]) & (place < end[:, None])
    greedy = jnp.all((likeliest == targets) | ~counted, axis=-1)
    found = jnp.sum(jnp.where(counted, own, 0.0), axis=-1), greedy
    return for_every_process(found, mesh)


def _told(logits, targets):
    return -optax.softmax_cross_entropy_with_integer_labels(logits, targets), jnp.argmax(logits, axis=-1)


def _placed(*arrays, mesh: Mesh | None, **static):
    return shard_rows(functools.partial(_score, mesh=mesh, **static), mesh, row_axes(mesh) if mesh else "")(*arrays)


score_padded = jax.jit(_placed, static_argnames=("graph", "mesh"))
