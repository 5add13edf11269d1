"""Everything `nagjax.report` measures, of one model on one text, as one plain record."""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from nagjax.console import Progress
from nagjax.layers.where import Where
from nagjax.measure import angles, calibration, damage, gradients, outliers, similarity
from nagjax.measure.cuts import RULES, Cutter
from nagjax.measure.held_gates import held_losses, holds
from nagjax.measure.interventions import skipping, tapped
from nagjax.measure.probe import Probe, probe
from nagjax.model.transformer import Output
from nagjax.report.curve import check_depth, curve_of, text_batches
from nagjax.report.verdict_depth import depth_verdict
from nagjax.runs.opening import OpenRun
from nagjax.train.head_loss import by_token, head_loss
from nagjax.train.loss import Batch

DIGITS = 5  # significant ones that are kept in the record


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much text each part of a diagnosis reads, in batches of the run's size."""

    probes: int = 4
    skips: int = 4  # one pass of twice the length for each block and batch
    curve: int = 8


def diagnose(
    run: OpenRun,
    effort: Effort = Effort(),
    data: str | None = None,
    rules: Sequence[str] = tuple(RULES),
    say: Callable[[str], None] = lambda text: None,
) -> dict:
    """All measures of a run on validation text, as JSON values; `verdict` tells them in words.

    By sublayer [S, G] and by block [L, G] with G = (tokens inside a document, first tokens); the rest is of tokens
    inside documents. See `nagjax.measure` for what each is. The loss of a bidirectional model is that of masked tokens
    (`nagjax.measure.masked`). `say` is told what is being done.
    """
    check_depth(run)
    cutter = Cutter(run)
    text = text_batches(run, data, "validation", max(effort.probes, effort.skips))
    say(f"looking at the residual of {len(text[: effort.probes])} batches")
    options = {"progress": run.progress, "cuts": run.mod.get("cuts"), "causal": run.calibrated}
    mesh = run.blueprint.mesh
    seen = [_profiles(probe(run.model, batch, mesh=mesh, **options)) for batch in text[: effort.probes]]
    say("gradients by depth")
    graph, params = nnx.split(run.model)
    slopes = jax.jit(functools.partial(_gradients, graph, options))
    felt = [slopes(params, batch) for batch in text[: effort.probes]]
    say(f"leaving out each of {cutter.depth} blocks")
    skips = _skips(run, text[: effort.skips], options, Progress("left out: block", cutter.depth, tell=say))
    say(f"leaving out more and more blocks, by {len(rules)} rules")
    config = run.config
    record = {
        "run": str(run.folder),
        "scheme": config.scheme.name,
        "title": config.scheme.title if config.model.causal else f"{config.scheme.title}, asked for masked tokens",
        "depth": config.model.depth,
        "width": config.model.width,
        "kept": list(config.model.kept),
        "step": run.step,
        "loss": cutter.loss(text[: effort.probes]),
        "tokens": int(sum(np.sum(batch.counted) for batch in text[: effort.probes])),
        **_mean(seen),
        "gradients": _mean(felt),
        "calibration": _calibration(calibration.reliability_on(run.model, text[: effort.probes], **options)),
        "held_gates": _held_gates(run, text, data, say),
        "skips": skips,
        "curve": curve_of(run, cutter, rules, effort.curve, data),
    }
    record = _plain(record)
    return record | {"verdict": depth_verdict(record)}


@jax.jit
def _profiles(seen: Probe) -> dict:
    """What is kept of a probe: its statistics, and the measures of its sampled tokens."""
    h = seen.sample
    ranks = jax.lax.map(lambda x: (similarity.effective_rank(x), similarity.stable_rank(x)), h)
    return {
        "sublayers": seen.sublayers | {"massive_max": seen.massive_max},
        "blocks": seen.blocks | {"jacobian": seen.jacobian},
        "attention": {"first": jnp.mean(seen.attention, axis=1), "sinks": jax.vmap(outliers.sink_rate)(seen.attention)},
        "gates": seen.gates,
        "lens": seen.lens,
        "angular_distance": angles.angular_distances(h),
        "cka": similarity.cka_matrix(h),
        "effective_rank": ranks[0],
        "stable_rank": ranks[1],
        "successive_update_angle": jnp.mean(angles.successive_update_angle(h), axis=-1),
        "angle_to_end": jnp.mean(angles.angle_to_end(h), axis=-1),
        "progress_to_end": jnp.mean(angles.progress_to_end(h), axis=-1),
    }


def _gradients(graph, options, params, batch: Batch) -> dict[str, Float[Array, " L"]]:
    """Norms of the mean loss' gradient by block: with respect to its parameters, and to the residual in front of it."""

    def loss(params, meters):
        model = nnx.merge(graph, params)
        output = model(batch.tokens, batch.where, intervene=tapped(meters), **options)
        nats, sums = head_loss(model, output, batch)
        return nats / jnp.maximum(sums.count, 1.0)

    depth = nnx.merge(graph, params).config.depth
    to_params, squares = jax.grad(loss, argnums=(0, 1))(params, jnp.zeros(depth))
    return {"parameters": gradients.stacked_norms(to_params["blocks"]), "residual": jnp.sqrt(squares)}


def _calibration(found: Float[Array, "bins 3"]) -> dict:
    """By bin that has any: share of the tokens, mean confidence, share of right predictions."""
    sums = np.asarray(found)
    return {
        "error": calibration.expected_calibration_error(found),
        "bins": [[count / sums[:, 0].sum(), sure / count, right / count] for count, sure, right in sums if count],
    }


def _held_gates(run: OpenRun, text: Sequence[Batch], data: str | None, say: Callable[[str], None]) -> dict | None:
    """Nats per token that gates held at their mean add to the loss; None for a model whose gates cannot be held."""
    if not holds(run.model):
        return None
    say("holding every gate at its mean")
    training = text_batches(run, data, "train", len(text))
    found = {name: np.array(own) for name, own in held_losses(run.model, training, text, progress=run.progress).items()}
    whole = found.pop("whole")
    return {
        name: {"added_loss": np.mean(own - whole), "standard_error": _standard_error(own - whole)}
        for name, own in found.items()
    }


def _standard_error(added: Float[np.ndarray, "*S batches"]) -> Float[np.ndarray, "*S"] | None:
    """Of means over the batches, from their spread; None for one batch."""
    count = added.shape[-1]
    return added.std(axis=-1, ddof=1) / count**0.5 if count > 1 else None


def _skips(run: OpenRun, batches: Sequence[Batch], options: dict, progress: Progress) -> dict:
    """What skipping each block alone does to the loss, to the output and to later blocks."""
    graph, params = nnx.split(run.model)
    one = jax.jit(functools.partial(_skip, graph, options))
    depth = run.config.model.depth
    found = []
    for block in range(depth):
        found.append([jax.device_get(one(params, batch, jnp.int32(block))) for batch in batches])
        progress(block + 1)
    total = lambda name: np.array([[part[name] for part in own] for own in found], np.float64)  # noqa: E731
    added = (total("nats") - total("whole")) / total("count")
    effects = total("effect_max").max(axis=1)
    return {
        "batches": len(batches),
        "added_loss": added.mean(axis=1),
        "standard_error": _standard_error(added),
        "output_effect": total("output").mean(axis=1),
        "effects": np.triu(effects, 1),
        "mean_effects": np.triu(total("effect_mean").mean(axis=1), 1),
        "depth_score": damage.depth_score(effects),
        "contributing": damage.contributing(added.mean(axis=1)),
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
        "count": whole.count,
        "output": jnp.sum(jnp.where(inside, effects, 0.0)) / jnp.maximum(jnp.sum(inside), 1),
        "effect_max": jnp.max(effect, axis=(1, 2)),
        "effect_mean": jnp.sum(effect, axis=(1, 2)) / jnp.maximum(jnp.sum(inside), 1),
    }


def _rows(output: Output, rows: slice) -> Output:
    return output._replace(hidden=output.hidden[rows], log_scale=output.log_scale[rows])


def _mean(records: Sequence[dict]) -> dict:
    return jax.tree.map(lambda *values: np.mean([np.asarray(value) for value in values], axis=0), *records)


def _plain(value):
    """JSON values, numbers cut to some digits; what is not finite becomes None."""
    if isinstance(value, dict):
        return {name: _plain(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(own) for own in value]
    if isinstance(value, np.ndarray | jax.Array):
        return _plain(np.asarray(value).tolist())
    if isinstance(value, float | np.floating):
        return float(f"{value:.{DIGITS}g}") if np.isfinite(value) else None
    return value
