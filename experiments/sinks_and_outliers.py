"""Attention sinks, outliers, and what 8 bits cost because of them.

Claim: NAG has weaker attention sinks and fewer outliers than plain pre-norm, and loses less to 8-bit rounding.
Source: Figliolia & Millidge 2026, arXiv:2606.16112 (weaker sinks, weights more centred on zero); the rest is this
  project's question. Measures: sinks, Gu et al. 2024, arXiv:2410.10781; massive activations, Sun et al. 2024,
  arXiv:2402.17762; absmax int8, Dettmers et al. 2022, arXiv:2208.07339; e4m3, Micikevicius et al., arXiv:2209.05433
Expected: NAG below plain in first-token attention, kurtosis, massive ratio, and loss added by int8 and by fp8 (no
  figures published)
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: 8 GPUs or a TPU slice, one task per run
Time: smoke 15 s; cpu about 14 min with --processes 2; h200 and paper not measured
Command: python -m experiments.sinks_and_outliers --processes 2

Sinks: the attention that tokens inside a document give to its first one, mean over heads, and the share of the heads
that give it more than 0.3. Outliers: over the features of the residual behind each sublayer, kurtosis (mean over
tokens) and max / median (the largest of any token). Neither depends on the residual's length. Weights: kurtosis, peak
and offset from zero of every matrix. Rounding: the branches' matrices (int8 and int4 with a scale for each output, e4m3
with one for each matrix) and what the branches read (one scale for a whole batch, taken as it comes), on validation
text; embedding, head, gates and the inside of the branches stay as they are. Only numbers are rounded, the arithmetic
is the run's own: this tells of losses, not of speed. Differences are paired by seed, at the schemes' default rates,
untuned, which decides nothing.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from matplotlib.figure import Figure

from experiments.harness.figures import look, panels
from experiments.harness.jobs import Record, Training
from experiments.harness.one_shape import Settings, trainings
from experiments.harness.results import Summary
from experiments.harness.statistics import mean_interval
from experiments.harness.verdicts import Gap, ahead_of_all
from nagjax.measure import outliers
from nagjax.measure.probe import probe
from nagjax.measure.rounding import float8_round_trip, integer_round_trip
from nagjax.residual import Scheme
from nagjax.runs.opening import OpenRun, open_run
from nagjax.train.evaluator import Evaluator
from nagjax.train.head_loss import head_loss
from nagjax.train.loss import Batch

PLAIN, JUDGED = "plain", "nag"
PROBED = 4  # batches that sinks and outliers are looked for in
KINDS = ("float", "int8", "int4", "fp8")
ROUNDED = {  # weights, what branches read
    "int8 weights": ("int8", "float"),
    "int8 inputs": ("float", "int8"),
    "int8": ("int8", "int8"),
    "fp8 weights": ("fp8", "float"),
    "fp8 inputs": ("float", "fp8"),
    "fp8": ("fp8", "fp8"),
    "int4 weights": ("int4", "float"),
    "int4 inputs": ("float", "int4"),
}


SIZES = {
    "smoke": Settings(2, 16, 16, 8, 4, 1, ("nag",), 1),
    "cpu": Settings(16, 64, 128, 8, 180, 3, eval_batches=12),
    "h200": Settings(24, 512, 1024, 32, 600, 3),
    "paper": Settings(64, 512, 1024, 64, 16_000, 5),
}


def plan(settings: Settings) -> list[Training]:
    return trainings(settings, looked_inside)


def looked_inside(folder: Path) -> dict:
    """Sinks by block, outliers by sublayer, weights by matrix, and what rounding adds to the loss."""
    run = open_run(folder)
    text = list(Evaluator(run.blueprint).batches(run.config.train.eval_batches))
    return residuals(run, text[:PROBED]) | {"weights": weights(run), "damage": damage(run, text)}


def residuals(run: OpenRun, text: Sequence[Batch]) -> dict:
    """`first` and `sinks` by block; `uniform`, what even attention would give to first tokens; `kurtosis` (tokens
    inside documents), `kurtosis_first` (first tokens) and `massive` (the largest of all) by sublayer."""
    seen = jax.device_get([probe(run.model, batch, sample=8, progress=run.progress) for batch in text])
    heads = np.mean([one.attention for one in seen], axis=0)
    kurtosis = np.mean([one.sublayers["kurtosis"] for one in seen], axis=0)
    queries = np.concatenate([_places(batch) for batch in text])
    return {
        "first": _rounded(heads.mean(axis=1)),
        "sinks": _rounded((heads > outliers.SINK).mean(axis=1)),
        "uniform": float(np.mean(1.0 / (queries + 1.0))) if len(queries) else 1.0,
        "kurtosis": _rounded(kurtosis[:, 0]),
        "kurtosis_first": _rounded(kurtosis[:, 1]),
        "massive": _rounded(np.max([one.massive_max for one in seen], axis=(0, 2))),
    }


def _places(batch: Batch) -> Int[np.ndarray, " n"]:
    """Positions of the tokens that attention is looked at for."""
    positions = np.asarray(batch.positions)
    return positions[(np.asarray(batch.weights) > 0) & (positions > 0)]


def weights(run: OpenRun) -> dict[str, dict[str, float]]:
    """Kurtosis, peak and offset of the branches' matrices by name, mean over blocks; and of embedding and head."""
    roles = jax.tree_util.tree_leaves_with_path(run.blueprint.parameters)
    named = {
        f"{path[1].key}.{path[-1].key}" if path[0].key == "blocks" else path[0].key: at
        for at, (path, parameter) in enumerate(roles)
        if parameter.role in ("matrix", "embedding", "head")
    }

    @jax.jit
    def measured(leaves: list[Array]) -> dict[str, dict[str, Array]]:
        # Blocks are stacked: each has its own row of numbers.
        rows = {name: leaves[at].reshape(leaves[at].shape[0] if "." in name else 1, -1) for name, at in named.items()}
        return {name: {told: jnp.mean(of(row)) for told, of in WEIGHTS.items()} for name, row in rows.items()}

    found = jax.device_get(measured(jax.tree.leaves(run.params)))
    return {name: {told: float(f"{value:.5g}") for told, value in own.items()} for name, own in found.items()}


WEIGHTS = {"kurtosis": outliers.kurtosis, "peak": outliers.peak, "offset": outliers.offset}


def round_trips(axes: Sequence[int] | None) -> dict[str, Callable[[Array], Array]]:
    """What `KINDS` make of an array."""
    return {
        "float": lambda x: x,
        "int8": lambda x: integer_round_trip(x, 8, axes),
        "int4": lambda x: integer_round_trip(x, 4, axes),
        "fp8": lambda x: float8_round_trip(x, axes),
    }


def round_matrices(run: OpenRun, kind: str) -> dict:
    """The run's parameters with the matrices of its branches rounded."""
    trip = round_trips((-2, -1) if kind == "fp8" else (-2,))[kind]  # integers: a scale for each output
    one = lambda described, x: trip(x) if described.role == "matrix" else x  # noqa: E731
    return jax.jit(lambda params: jax.tree.map(one, run.blueprint.parameters, params))(run.params)


class Rounding:
    """A scheme whose branches read rounded numbers; the kind is data, one program serves all. What the scheme itself
    computes with stays as it is."""

    def __init__(self, scheme: Scheme, kind: Int[Array, ""]):
        self._scheme, self._kind = scheme, kind

    def __getattr__(self, name):
        return getattr(self._scheme, name)

    def read(self, stream) -> Float[Array, "B T D"]:
        return jax.lax.switch(self._kind, tuple(round_trips(None).values()), self._scheme.read(stream))


def damage(run: OpenRun, text: Sequence[Batch]) -> dict[str, float]:
    """Nats per token that each of `ROUNDED` adds to the loss."""

    @jax.jit
    def sums(params, batch: Batch, kind) -> tuple[Array, Array]:
        model = run.blueprint.model(params)
        model.scheme = Rounding(model.scheme, kind)
        model.mod = dataclasses.replace(model.mod, scheme=model.scheme)
        _, found = head_loss(model, model(batch.tokens, batch.where, progress=run.progress), batch)
        return found.nats, found.count

    matrices = {"float": run.params} | {kind: round_matrices(run, kind) for kind in KINDS[1:]}

    def loss(stored: str, read: str) -> float:
        kind = jnp.int32(KINDS.index(read))
        nats, count = np.sum(
            jax.device_get([sums(matrices[stored], batch, kind) for batch in text]), axis=0, dtype=float
        )
        return float(nats / count)

    base = loss("float", "float")
    return {name: loss(*how) - base for name, how in ROUNDED.items()}


def _rounded(values: np.ndarray) -> list[float]:
    return [float(f"{value:.5g}") for value in values]


SHOWN = "first-token attention"
MEASURES = {  # what the claim is judged by, less of each being better; ratios by their logarithm
    "first-token attention": lambda metrics: float(np.mean(metrics["first"])),
    "log kurtosis": lambda metrics: float(np.log(np.mean(metrics["kurtosis"]))),
    "log massive ratio": lambda metrics: float(np.log(np.max(metrics["massive"]))),
    "int8 damage": lambda metrics: metrics["damage"]["int8"],
    "fp8 damage": lambda metrics: metrics["damage"]["fp8"],
}


def measured(records: Sequence[Record], scheme: str, of) -> dict:
    """By seed; runs that diverged are missing."""
    own = [r for r in records if r.labels["scheme"] == scheme and r.metrics["loss"] is not None]
    return {record.labels["seed"]: of(record.metrics) for record in own}


def _judged(records: Sequence[Record], scheme: str, of) -> dict[int, float | None]:
    """By seed; None: diverged."""
    lost = {r.labels["seed"]: None for r in records if r.labels["scheme"] == scheme and r.metrics["loss"] is None}
    return lost | measured(records, scheme, of)


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    rows = [_row(records, scheme) for scheme in settings.schemes if measured(records, scheme, MEASURES["int8 damage"])]
    told = f"{'; '.join(_told(row) for row in rows)} (nats per token, mean over {settings.seeds} seeds)"
    gaps = _gaps(records) if {PLAIN, JUDGED} <= set(settings.schemes) else {}
    if gaps:
        told += f"; plain minus NAG: {', '.join(f'{name} {gap.interval or gap}' for name, gap in gaps.items())}"
    known = {name: gap for name, gap in gaps.items() if gap.interval}
    parts = {name: dataclasses.asdict(gap.interval) | {"p": gap.p} for name, gap in known.items()}
    found = f"{SHOWN}, plain minus NAG: {gaps[SHOWN].interval.text(4)}" if SHOWN in known else ""
    return Summary(told, ahead_of_all(list(gaps.values())), rows, {"plain_minus_nag": parts}, found)


def _gaps(records: Sequence[Record]) -> dict[str, Gap]:
    sides = {name: [_judged(records, scheme, of) for scheme in (PLAIN, JUDGED)] for name, of in MEASURES.items()}
    gaps = {name: Gap.of(name, plain, nag) for name, (plain, nag) in sides.items()}
    return {name: gap for name, gap in gaps.items() if gap.values}


def _row(records: Sequence[Record], scheme: str) -> dict:
    own = [r.metrics for r in records if r.labels["scheme"] == scheme and r.metrics["loss"] is not None]
    mean = lambda of: float(np.mean([of(metrics) for metrics in own]))  # noqa: E731
    matrices = lambda name: mean(lambda m: np.mean([w[name] for w in m["weights"].values()]))  # noqa: E731
    return {
        "scheme": scheme,
        "loss": str(mean_interval([metrics["loss"] for metrics in own])),
        "first token": mean(lambda m: np.mean(m["first"])),
        "even": mean(lambda m: m["uniform"]),
        "sinks": mean(lambda m: np.mean(m["sinks"])),
        "kurtosis": mean(lambda m: np.mean(m["kurtosis"])),
        "massive": mean(lambda m: np.max(m["massive"])),
        "weights' kurtosis": matrices("kurtosis"),
        "peak": matrices("peak"),
        "offset": matrices("offset"),
        **{f"+ {name}": mean(lambda m, name=name: m["damage"][name]) for name in ROUNDED},
    }


def _told(row: dict) -> str:
    return (
        f"{row['scheme']}: first-token attention {row['first token']:.3f}, kurtosis {row['kurtosis']:.3g}, "
        f"massive ratio {row['massive']:.3g}, int8 +{row['+ int8']:.2g}, fp8 +{row['+ fp8']:.2g}"
    )


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    figure, (sinks, kurtosis, massive, lost) = panels(4, "Attention sinks, outliers, and what rounding costs")
    shown = [scheme for scheme in settings.schemes if measured(records, scheme, MEASURES["int8 damage"])]
    for place, scheme in enumerate(shown):
        style = {"color": look(scheme)["color"], "label": scheme}
        lines = {"first": sinks, "kurtosis": kurtosis, "massive": massive}
        for name, ax in lines.items():
            values = np.mean(list(measured(records, scheme, lambda m, name=name: m[name]).values()), axis=0)
            ax.plot(np.arange(1, len(values) + 1) / (1 if name == "first" else 2), values, **style)
        added = measured(records, scheme, lambda m: [m["damage"][name] for name in ROUNDED])
        at = np.arange(len(ROUNDED)) + (place - (len(shown) - 1) / 2) * 0.8 / len(shown)
        lost.bar(at, np.mean(list(added.values()), axis=0), 0.8 / len(shown), color=style["color"])
        for own in added.values():
            lost.scatter(at, own, s=5, color="#222222", zorder=3)
    for even in [r.metrics["uniform"] for r in records if r.metrics["loss"] is not None][:1]:
        sinks.axhline(even, color="#999999", linewidth=1, linestyle="--")
    sinks.set_ylabel("attention to the first token (dashed: if even)")
    kurtosis.set_ylabel("kurtosis of the residual's features")
    massive.set_ylabel("largest max / median of the residual's features")
    lost.set_ylabel("loss added (nats per token), logarithmic above 0.001")
    lost.set_yscale("symlog", linthresh=1e-3)
    lost.set_xticks(range(len(ROUNDED)), list(ROUNDED), rotation=30, ha="right")
    for ax in (sinks, kurtosis, massive):
        ax.set_xlabel("block")
    sinks.legend(frameon=False)
    return figure


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
