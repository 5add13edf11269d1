"""Measures the residual before and after every sublayer in one compiled pass."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int
from optax import softmax_cross_entropy_with_integer_labels as loss

from nagjax.errors import UserError
from nagjax.layers.lora import adapted
from nagjax.layers.softcap import softcap
from nagjax.layers.where import seen_mask
from nagjax.measure import angles, lens, modulators, norms, outliers
from nagjax.measure.counted import most_counted
from nagjax.measure.interventions import of_rows, rebuilt, residual, through
from nagjax.measure.jacobian import identity_distance
from nagjax.model.transformer import BlockCall, Transformer
from nagjax.ranges import Count, Seed, check_value
from nagjax.residual import Boundary
from nagjax.residual.arguments import share_done
from nagjax.train.distributed.mesh import batch_parts, pin_rows, row_axes
from nagjax.train.loss import Batch
from pallas_kernels.placement import shard_rows

ROWS = 2  # sequences, those with most counted tokens, for estimating Jacobians; at least one per part of a split batch
GROUPS = ("rest", "first")  # tokens inside a document, and first tokens of documents


class Probe(NamedTuple):
    """Results of one pass: means over the counted tokens, float32, NaN over no tokens. G is `GROUPS`: first tokens are
    separate, because they tend to be sinks and outliers. S sublayers, L blocks, N sampled tokens (none of them first).

    - sublayers: per sublayer [S, G]: norm and variance of the residual before it; contribution ||u||/||h|| and cosine
      of its update u with the residual; turn (radians); kurtosis and massive (max |h| / median |h|) after it; ran, the
      share of the tokens that did not skip it.
    - blocks: contribution, cosine and turn of whole blocks, and influence 1 - cos(h_l, h_l+1), each [L, G].
    - massive_max: the largest max |h| / median |h| of any counted token after the sublayer, [S, G].
    - attention: the share of each head's attention that goes to first tokens, [L, H].
    - jacobian: ||J - I||_F / sqrt(D) of each block, [L]; None for a scheme that does not declare `rebuilds`.
    - gates: health of NAG's modulators (`nagjax.measure.modulators.health`) and their `alpha`, each [S]; else None.
    - sample: residuals of the sampled tokens before each block and after the last, before the final norm, [L+1, N, D].
    - lens: divergence (nats), overlap of the top five, and loss (nats), each [L+1].
    - before, after: the residual before and after every sublayer, [S, B, T, D], if asked for, else None.
    - counts: the numbers of tokens behind the means: `groups` [G] for sublayers and blocks, `attention` [L],
      `jacobian` [] and `lens_loss` [], which counts sampled tokens.
    """

    sublayers: dict[str, Float[Array, "S G"]]
    blocks: dict[str, Float[Array, "L G"]]
    massive_max: Float[Array, "S G"]
    attention: Float[Array, "L H"]
    jacobian: Float[Array, " L"] | None
    gates: dict[str, Float[Array, " S"]] | None
    sample: Float[Array, "L+1 N D"]
    lens: dict[str, Float[Array, " L+1"]]
    before: Float[Array, "S B T D"] | None
    after: Float[Array, "S B T D"] | None
    counts: dict[str, Float[Array, "..."]]


def probe(
    model: Transformer,
    batch: Batch,
    *,
    full: bool = False,
    sample: int = 256,
    seed: int = 0,
    progress: float = 1.0,
    cuts: Float[Array, " S"] | None = None,
    causal: bool = False,
    mesh: Mesh | None = None,
) -> Probe:
    """Measures the stream before and after every sublayer in one compiled pass, with routing if the model has it.

    Statistics are computed inside the scan over depth, so that only `sample` tokens, drawn by `seed`, are kept at every
    depth; `full` keeps all of them, [S, B, T, D]. With a mesh, parameters and batch keep their sharding. `progress`,
    `cuts` and `causal` are those of `Transformer.__call__`. `nagjax.report.curve.text_batches` makes batches of a run.

    Raises UserError for a model that is no `Transformer`, for a batch that is no `Batch` or has no counted token inside
    a document, and for a `sample`, `seed` or `progress` out of range.
    """
    if not isinstance(model, Transformer):
        fix = "give a nagjax.Transformer, such as run.model; a residual in a model of your own has observe=True"
        raise UserError("model", type(model).__name__, fix)
    if not isinstance(batch, Batch):
        fix = "give a batch: nagjax.report.curve.text_batches(run, None, 'validation', 1)[0]"
        raise UserError("batch", type(batch).__name__, fix)
    check_value("sample", sample, Count)
    check_value("seed", seed, Seed)
    progress = share_done(progress)
    inside = np.flatnonzero(_inside(batch))
    if not inside.size:
        raise UserError("batch", batch.tokens.shape, "no token inside its documents counts: give one with targets")
    chosen = np.random.default_rng(seed).permutation(inside)[:sample]
    graph, params = nnx.split(model)
    options = {"graph": graph, "full": full, "causal": causal, "mesh": mesh}
    return _probe(params, batch, jnp.asarray(np.sort(chosen)), progress, cuts, **options)


def looks_at(batch: Batch) -> bool:
    """Whether `probe` can measure the batch: it has a counted token inside a document."""
    return bool(_inside(batch).any())


def _inside(batch: Batch) -> Bool[np.ndarray, "B T"]:
    counted, positions = jax.device_get((batch.counted, batch.positions))
    return np.asarray(counted) & (np.asarray(positions) > 0)


@functools.partial(jax.jit, static_argnames=("graph", "full", "causal", "mesh"))
def _probe(params, batch: Batch, chosen, progress, cuts, *, graph, full, causal, mesh) -> Probe:
    parts = 1 if mesh is None else batch_parts(mesh.shape)

    def look(params, batch):
        model = nnx.merge(graph, params)
        options = {"progress": progress, "cuts": cuts, "causal": causal}
        options |= {} if mesh is None else {"pin": pin_rows(mesh)}
        groups = _groups(batch)
        rows = most_counted(groups[0] > 0, max(ROWS, parts))
        output = model(batch.tokens, batch.where, intervene=_watch(groups, rows, chosen, full), **options)
        return _gathered(model, batch, groups, rows, chosen, output)

    split = mesh is not None and mesh.size > 1
    return (shard_rows(look, mesh, row_axes(mesh)) if split else look)(params, batch)


def _watch(groups: Float[Array, "G B T"], rows: Int[Array, " b"], chosen: Int[Array, " N"], full: bool):
    """The intervention that gathers the statistics and changes nothing. `rows`: the sequences on which Jacobians are
    estimated."""
    count = jnp.sum(groups, axis=(1, 2))

    def mean(values: Float[Array, "B T"]) -> Float[Array, " G"]:
        return _over(jnp.einsum("gbt,bt->g", groups, values, precision="highest"), count)

    def around(h0, h1, ran) -> tuple[dict, Array]:
        massive = outliers.massive_ratio(h1)
        stats = {
            "norm": norms.norm(h0),
            "variance": norms.variance(h0),
            **_step(h0, h1),
            "kurtosis": outliers.kurtosis(h1),
            "massive": massive,
            "ran": ran.astype(jnp.float32),
        }
        largest = jnp.max(jnp.where(groups > 0, massive, -jnp.inf), axis=(1, 2))
        return jax.tree.map(mean, stats), jnp.where(count > 0, largest, jnp.nan)

    def intervene(model: Transformer, stream, call: BlockCall):
        first, second = model.sublayers(stream, *call)
        h = [residual(model.scheme, s) for s in (stream, first.stream, second.stream)]
        stats = (around(h[0], h[1], first.ran), around(h[1], h[2], second.ran))
        sublayers, massive = jax.tree.map(lambda *pair: jnp.stack(pair), *stats)
        whole = _step(h[0], h[2]) | {"influence": 1.0 - norms.cosine(h[0], h[2])}
        seen = {
            "sublayers": sublayers,
            "massive_max": massive,
            "blocks": jax.tree.map(mean, whole),
            "attention": _sinks(model, stream, call, first.ran, groups[0] > 0),
            "attending": jnp.sum(groups[0] * first.ran),
            "sample": (_rows(h[0], chosen), _rows(h[2], chosen)),
            "read": _read(model, stream, call, chosen),
        }
        if model.scheme.rebuilds:
            seen["jacobian"] = _jacobian(model, h[0], call, rows, groups[0])
        if model.scheme.turns:
            gates = [_gate(model, *where, groups[0]) for where in _modulated(model, stream, first.stream, call)]
            seen["gates"] = jax.tree.map(lambda *pair: jnp.stack(pair), *gates)
        if full:
            seen["full"] = (jnp.stack(h[:2]), jnp.stack(h[1:]))
        return second.stream, seen

    return intervene


def _groups(batch: Batch) -> Float[Array, "G B T"]:
    """For each group of `GROUPS` 1 for its tokens, else 0."""
    counted, inside = batch.counted, batch.positions > 0
    return jnp.stack([counted & inside, counted & ~inside]).astype(jnp.float32)


def _over(total: Array, count: Array) -> Array:
    return jnp.where(count > 0, total / jnp.maximum(count, 1.0), jnp.nan)


def _step(h0, h1) -> dict:
    update = h1 - h0
    return {
        "contribution": norms.relative_contribution(update, h0),
        "cosine": norms.cosine(update, h0),
        "turn": angles.angle(h0, h1),
    }


def _rows(x: Float[Array, "B T ..."], chosen: Int[Array, " N"]) -> Float[Array, "N ..."]:
    return x.reshape(-1, *x.shape[2:])[chosen]


def _read(model: Transformer, stream, call: BlockCall, chosen) -> tuple[Array, Array]:
    """What the head would read before this block, for the sampled tokens."""
    rows = jax.tree.map(lambda x: _rows(x, chosen)[None], stream)
    last = jax.tree.map(lambda own: own[-1], model.blocks.mlp.gate)  # the gate of the boundary before the head
    at = model.boundary(last, model.entry, 0, 0, call.ctx.progress)
    hidden, log_scale = model.close(model.scheme.skip(rows, at))
    return hidden[0], log_scale[0]


def _sinks(model: Transformer, stream, call: BlockCall, ran, counted) -> Float[Array, " H"]:
    """Attention that the counted tokens which ran pay to first tokens. Heads are computed one at a time, so that memory
    holds only one [B, T, T]."""
    attention, where = call.layer.block.attention, call.ctx.where
    branch = adapted(attention.branch.of_block(call.layer.index[0] // 2), attention.lora, model.config.lora)
    x = model.scheme.read(stream).astype(model.config.compute_dtype)
    q, k = branch.queries_keys(x, where)
    k = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    mask = seen_mask(where, where, branch.window, model.config.causal)[:, 0]
    if model.config.mod.kv == "selected":
        mask &= ran[:, None, :] | ~ran[:, :, None]  # a skipping token has no query, but an empty row would be NaN

    def head(qk) -> Float[Array, ""]:
        scores = jnp.einsum("btd,bsd->bts", *qk, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
        scores = softcap(scores, model.config.block.softcap)
        weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
        return outliers.first_token_attention(weights[:, None], where.positions == 0, ran & counted)[0]

    found = jax.lax.map(head, (jnp.moveaxis(q, 2, 0), jnp.moveaxis(k, 2, 0)))
    return jnp.where(jnp.any(ran & counted), found, jnp.nan)


def _jacobian(model: Transformer, h, call: BlockCall, rows: Int[Array, " b"], counted) -> Float[Array, ""]:
    """The distance ||J - I||_F / sqrt(D) of the block, as a map of residuals, from the identity, estimated on some
    sequences."""
    h, counted, own = h[rows], counted[rows], of_rows(call, rows)
    block = lambda h: residual(model.scheme, through(model, rebuilt(model, h, own), own))  # noqa: E731
    distance = identity_distance(block, h, jax.random.fold_in(jax.random.key(0), call.layer.block_index))
    return jnp.sqrt(_over(jnp.sum(distance * counted), jnp.sum(counted)))


def _modulated(model: Transformer, stream, middle, call: BlockCall):
    layer, progress = call.layer, call.ctx.progress
    for i, (own, at) in enumerate(((layer.block.attention, stream), (layer.block.mlp, middle))):
        yield at, model.boundary(own.gate, layer.entry, layer.index[i], layer.following[i], progress)


def _gate(model: Transformer, stream, at: Boundary, counted) -> dict[str, Array]:
    found = modulators.health(model.scheme.turn(stream, at), at.gate(stream.direction), counted)
    return found | {"alpha": model.scheme.alpha(at)}


def _gathered(model: Transformer, batch: Batch, groups, rows, chosen, output) -> Probe:
    seen = output.seen
    flat = lambda tree: jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), tree)  # noqa: E731
    before, after = seen["sample"]
    last = _rows(output.hidden, chosen), _rows(output.log_scale, chosen)
    read = jax.tree.map(lambda own, end: jnp.concatenate([own, end[None]]), seen["read"], last)
    final = model.logits(output._replace(hidden=last[0][None], log_scale=last[1][None]))[0]
    targets, weights = (_rows(x, chosen) for x in (batch.targets, batch.weights))

    def one(row) -> dict[str, Array]:
        logits = model.logits(output._replace(hidden=row[0][None], log_scale=row[1][None]))[0]
        return {
            "divergence": jnp.mean(lens.lens_divergence(logits, final)),
            "overlap": jnp.mean(lens.top_overlap(logits, final)),
            "loss": _over(jnp.sum(weights * loss(logits, targets)), jnp.sum(weights)),
        }

    full = flat(seen.get("full", (None, None)))
    counts = {
        "groups": jnp.sum(groups, axis=(1, 2)),
        "attention": seen["attending"],
        "jacobian": jnp.sum(groups[0][rows]),
        "lens_loss": jnp.sum(weights),
    }
    return Probe(
        sublayers=flat(seen["sublayers"]),
        blocks=seen["blocks"],
        massive_max=flat(seen["massive_max"]),
        attention=seen["attention"],
        jacobian=seen.get("jacobian"),
        gates=flat(seen["gates"]) if "gates" in seen else None,
        sample=jnp.concatenate([before[:1], after]),
        lens=jax.lax.map(one, read),
        before=full[0],
        after=full[1],
        counts=counts,
    )
