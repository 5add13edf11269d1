"""All measurements of `nagjax.measure` on one model and one text, as one plain record."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from nagjax.console import Progress
from nagjax.errors import UserError
from nagjax.layers.where import Where
from nagjax.measure import angles, calibration, damage, gradients, modulators, outliers, similarity
from nagjax.measure.counted import first_of_each, mean, scales
from nagjax.measure.cuts import RULES, Cutter, check_rules, forward_options
from nagjax.measure.held_gates import held_losses, holds
from nagjax.measure.interventions import skipping, tapped
from nagjax.measure.probe import Probe, looks_at, probe
from nagjax.model.transformer import Output
from nagjax.ranges import Count, check_fields, check_value
from nagjax.report.curve import check_depth, check_loss, curve_of, text_batches
from nagjax.report.verdict_depth import depth_verdict
from nagjax.runs.opening import OpenRun
from nagjax.train.head_loss import by_token, head_loss
from nagjax.train.loss import Batch

DIGITS = 5  # significant digits kept in the record


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much text each part of a diagnosis reads, in batches of the run's size; of a mixture at least one of each
    corpus."""

    probes: Count = 4
    skips: Count = 4  # each block takes a pass over twice the sequences of a batch
    curve: Count = 8

    def __post_init__(self):
        check_fields(self, "effort.")


def diagnose(
    run: OpenRun,
    effort: Effort = Effort(),
    data: str | None = None,
    rules: Sequence[str] = tuple(RULES),
    say: Callable[[str], None] = lambda text: None,
) -> dict:
    """Measures a run on validation text. Returns JSON values, with `verdict`, which says in words what they show.

    Values by sublayer have the shape [S, G] and those by block [L, G], with G = (tokens inside a document, first
    tokens). All other values are of tokens inside documents; losses, gradients and calibration are of all tokens that
    count. `nagjax.measure` defines each measure. The loss of a bidirectional model is that of masked tokens
    (`nagjax.measure.masked`). Means are over the counted tokens of all batches, weighted as in the loss
    (`nagjax.measure.counted`); ranks, CKA and norms of gradients are means over batches. None means not measured or not
    finite. `say` is called with a line about each step.

    Raises UserError for an unknown rule, a model of one block, an encoder without a head, a text without a target that
    counts, and a whole model whose loss is not finite.
    """
    check_depth(run)
    check_rules(rules)
    check_value("effort", effort, Effort)
    cutter = Cutter(run)
    text = text_batches(run, data, "validation", max(effort.probes, effort.skips))
    looked, skipped = (_text(run, first_of_each(text, count)) for count in (effort.probes, effort.skips))
    loss = check_loss(run, cutter.loss(looked.batches))
    say(f"looking at the residual of {len(looked.batches)} batches")
    options = forward_options(run)
    seen = _residual(run, looked, options)
    say("gradients by depth")
    slopes = _gradients(run, looked, options)
    say(f"leaving out each of {cutter.depth} blocks")
    skips = _skips(run, skipped, options, Progress("left out: block", cutter.depth, tell=say))
    say(f"leaving out more and more blocks, by {len(rules)} rules")
    config = run.config
    record = {
        "run": str(run.folder),
        "scheme": config.scheme.name,
        "title": _title(run),
        "depth": config.model.depth,
        "width": config.model.width,
        "kept": list(config.model.kept),
        "step": run.step,
        "loss": loss,
        "tokens": _tokens(looked),
        **seen,
        "gradients": slopes,
        "calibration": _calibration(
            calibration.reliability_on(run.model, looked.batches, looked.scales.tolist(), **options)
        ),
        "held_gates": _held_gates(run, _text(run, text), data, say),
        "skips": skips,
        "curve": curve_of(run, cutter, rules, effort.curve, data),
    }
    record = _plain(record)
    return record | {"verdict": depth_verdict(record)}


def _title(run: OpenRun) -> str:
    scheme, model = run.config.scheme.title, run.config.model
    if not model.causal:
        return f"{scheme}, asked for masked tokens"
    return f"{scheme}, skipping by angle at the calibrated rate {model.mod.rate[0]:g}" if run.calibrated else scheme


class Text(NamedTuple):
    """The batches that have a counted target, the number of these in each, and the weight of one such target in a
    mean."""

    batches: list[Batch]
    counts: Float[np.ndarray, " N"]
    scales: Float[np.ndarray, " N"]


def _text(run: OpenRun, batches: Sequence[Batch]) -> Text:
    """The batches with their counts and weights. Raises UserError if no target counts."""
    counts = np.array([float(np.sum(batch.weights)) for batch in batches])
    own, some = scales(run.config.data, batches, counts), counts > 0
    return Text([batch for batch, has in zip(batches, some, strict=True) if has], counts[some], own[some])


def _tokens(text: Text) -> int:
    """The number of targets that count."""
    return int(sum(np.sum(batch.weights > 0) for batch in text.batches))


def _residual(run: OpenRun, text: Text, options: dict) -> dict:
    """The measures from the probe and its sampled tokens, over all batches. Raises UserError if it finds no token."""
    found, weights, sampled, mesh = [], [], [], run.blueprint.mesh
    for batch, scale in zip(text.batches, text.scales, strict=True):
        if looks_at(batch):
            seen = probe(run.model, batch, mesh=mesh, **options)
            found.append(jax.device_get((seen._replace(sample=None), _sampled(seen.sample))))
            weights.append(scale)
            sampled.append(seen.sample.shape[1])
    if not found:
        raise UserError("batches", len(text.batches), "no token inside their documents counts: give more of them")
    probes, samples = (jax.tree.map(lambda *own: np.stack(own), *part) for part in zip(*found, strict=True))
    return _over_batches(probes, samples, np.array(weights), np.array(sampled))


def _over_batches(seen: Probe, samples: dict, weights: Float[np.ndarray, " N"], sampled: Int[np.ndarray, " N"]) -> dict:
    """Reduces the stacked results of N batches to means."""
    groups = weights[:, None] * seen.counts["groups"]
    inside = groups[:, 0]
    of_groups = lambda x: mean(x, groups[:, None])  # noqa: E731
    of_inside = lambda x: mean(x, inside)  # noqa: E731
    largest = np.where(seen.counts["groups"][:, None] > 0, seen.massive_max, -np.inf).max(axis=0)
    attention = mean(seen.attention, weights[:, None] * seen.counts["attention"])
    squares = None if seen.jacobian is None else mean(seen.jacobian**2, weights * seen.counts["jacobian"])
    losses = mean(seen.lens["loss"], inside * seen.counts["lens_loss"] / sampled)
    return {
        "sampled": int(sampled.max()),
        "sublayers": jax.tree.map(of_groups, seen.sublayers) | {"massive_max": largest},
        "blocks": jax.tree.map(of_groups, seen.blocks) | {"jacobian": None if squares is None else np.sqrt(squares)},
        "attention": {
            "first": np.mean(attention, axis=1),
            "sinks": np.mean(np.where(np.isnan(attention), np.nan, attention > outliers.SINK), axis=1),
        },
        "gates": None if seen.gates is None else _gates(seen.gates, of_inside),
        "lens": jax.tree.map(of_inside, seen.lens) | {"loss": losses},
        **jax.tree.map(of_inside, samples),
    }


def _gates(found: dict[str, Float[np.ndarray, "N S"]], mean_of: Callable) -> dict[str, Float[np.ndarray, " S"]]:
    """`modulators.health` of all batches' tokens."""
    means = jax.tree.map(mean_of, found)
    within, between = found["spread"] ** 2, (found["modulator"] - means["modulator"]) ** 2
    dead = (means["turn"] < modulators.DEAD).astype(float)
    return means | {"spread": np.sqrt(mean_of(within + between)), "dead": dead}


@jax.jit
def _sampled(h: Float[Array, "L+1 N D"]) -> dict:
    """Measures of sampled tokens' residuals."""
    with jax.default_matmul_precision("highest"):
        ranks = jax.lax.map(lambda x: (similarity.effective_rank(x), similarity.stable_rank(x)), h)
        return {
            "angular_distance": angles.angular_distances(h),
            "cka": similarity.cka_matrix(h),
            "effective_rank": ranks[0],
            "stable_rank": ranks[1],
            "successive_update_angle": jnp.nanmean(angles.successive_update_angle(h), axis=-1),
            "angle_to_end": jnp.mean(angles.angle_to_end(h), axis=-1),
            "progress_to_end": jnp.mean(angles.progress_to_end(h), axis=-1),
        }


def _gradients(run: OpenRun, text: Text, options: dict) -> dict[str, Float[np.ndarray, " L"] | None]:
    """Norms of the gradient of the mean loss by block, means over the batches: with respect to the block's parameters,
    and to the residual in front of it (None for a scheme that does not declare `rebuilds`)."""
    graph, params = nnx.split(run.model)
    rebuilds, depth = run.model.scheme.rebuilds, run.config.model.depth

    def loss(params, meters, batch: Batch):
        model = nnx.merge(graph, params)
        own = options | ({"intervene": tapped(meters)} if rebuilds else {})
        nats, sums = head_loss(model, model(batch.tokens, batch.where, **own), batch)
        return nats / sums.count

    @jax.jit
    def norms(params, batch: Batch):
        to_params, squares = jax.grad(loss, argnums=(0, 1))(params, jnp.zeros(depth), batch)
        return gradients.stacked_norms(to_params["blocks"]), jnp.sqrt(squares)

    found = [jax.device_get(norms(params, batch)) for batch in text.batches]
    by_part = (mean(np.stack(own), text.scales * text.counts) for own in zip(*found, strict=True))
    to_params, to_residual = by_part
    return {"parameters": to_params, "residual": to_residual if rebuilds else None}


def _calibration(found: Float[Array, "bins 3"]) -> dict:
    """For each bin with tokens: share of the tokens, mean confidence, share of right predictions."""
    sums = np.asarray(found)
    return {
        "error": calibration.expected_calibration_error(found),
        "bins": [[count / sums[:, 0].sum(), sure / count, right / count] for count, sure, right in sums if count],
    }


def _held_gates(run: OpenRun, text: Text, data: str | None, say: Callable[[str], None]) -> dict | None:
    """Nats per token that gates held at their mean add to the loss; None for a model whose gates cannot be held."""
    if not holds(run.model):
        return None
    say("holding every gate at its mean")
    training = text_batches(run, data, "train", len(text.batches))
    losses = held_losses(run.model, training, text.batches, progress=run.progress)
    found = {name: np.array(own) for name, own in losses.items()}
    whole = found.pop("whole")
    return {name: _added(own - whole, text.scales * text.counts) for name, own in found.items()}


def _added(added: Float[np.ndarray, "*S N"], weights: Float[np.ndarray, " N"]) -> dict:
    """The mean of what was added to N batches' losses, and its standard error from the spread over batches; None for
    one batch. For a mixture, the spread includes the differences between its corpora."""
    share, count = weights / weights.sum(), len(weights)
    with np.errstate(invalid="ignore"):  # a loss may be infinite
        whole = added @ share
        spread = np.sqrt(np.sum((share * (added - whole[..., None])) ** 2, axis=-1) * count / max(count - 1, 1))
    return {"added_loss": whole, "standard_error": spread if count > 1 else None}


def _skips(run: OpenRun, text: Text, options: dict, progress: Progress) -> dict:
    """The effect of skipping each block alone on the loss, on the output and on later blocks."""
    graph, params = nnx.split(run.model)
    one = jax.jit(functools.partial(_skip, graph, options))
    depth = run.config.model.depth
    found = []
    for block in range(depth):
        found.append([jax.device_get(one(params, batch, jnp.int32(block))) for batch in text.batches])
        progress(block + 1)
    by_batch = lambda name: np.array([[part[name] for part in own] for own in found], np.float64)  # noqa: E731
    inside = by_batch("inside")[0] @ text.scales or np.nan
    over_tokens = lambda name: np.einsum("sn...,n->s...", by_batch(name), text.scales) / inside  # noqa: E731
    effects = by_batch("effect_max").max(axis=1)
    per_target = (by_batch("nats") - by_batch("whole")) / text.counts
    added = _added(per_target, text.scales * text.counts)
    return {
        "batches": len(text.batches),
        "tokens": _tokens(text),
        "loss": float(text.scales @ by_batch("whole")[0] / (text.scales @ text.counts)),
        **added,
        "output_effect": over_tokens("output"),
        "effects": np.triu(effects, 1),
        "mean_effects": np.triu(over_tokens("effect"), 1),
        "depth_score": damage.depth_score(effects),
        "contributing": damage.contributing(added["added_loss"]),
    }


def _skip(graph, options, params, batch: Batch, block: Int[Array, ""]) -> dict[str, Array]:
    model, size = nnx.merge(graph, params), batch.tokens.shape[0]
    twice = jax.tree.map(lambda x: jnp.concatenate([x, x]), batch)
    where = Where(twice.segment_ids, twice.positions)
    output = model(twice.tokens, where, intervene=skipping(block), **options)
    _, whole = head_loss(model, _rows(output, slice(size)), batch)
    _, less = head_loss(model, _rows(output, slice(size, None)), batch)
    effects = by_token(lambda z: damage.output_effect(z[:size], z[size:]), model, output)
    inside = batch.counted & (batch.positions > 0)
    effect = jnp.where(inside, output.seen, 0.0)
    return {
        "whole": whole.nats,
        "nats": less.nats,
        "inside": jnp.sum(inside),
        "output": jnp.sum(jnp.where(inside, effects, 0.0)),
        "effect": jnp.sum(effect, axis=(1, 2)),
        "effect_max": jnp.max(effect, axis=(1, 2)),
    }


def _rows(output: Output, rows: slice) -> Output:
    return output._replace(hidden=output.hidden[rows], log_scale=output.log_scale[rows])


def _plain(value):
    """JSON values: numbers are rounded to DIGITS significant digits, and numbers that are not finite become None."""
    if isinstance(value, dict):
        return {name: _plain(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(own) for own in value]
    if isinstance(value, np.ndarray | jax.Array):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, float | np.floating):
        return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None
    return value
