"""Convex against additive gates by depth: where the convex form stops learning, and the gradient that says why.

Claim: with convex gates, `h <- (1 - r) h + r u`, the gradient at the first layer vanishes with depth and training fails
  beyond about 20 sublayers; with additive gates, `h <- h + r u`, it does not.
Source: Kramer 2026, arXiv:2606.31859
Expected: convex near its start loss of 6.0 at 40 to 48 sublayers (GPT-2 BPE), additive improving with depth
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: 8 GPUs or a TPU slice
Time: smoke 25 s; cpu about 15 min with --processes 2; h200 and paper not measured
Command: python -m experiments.review_depth --processes 2

Arms: Review Residuals, the same gate in convex form, and additive and convex Highway. The gradient is that of the mean
loss on one validation batch: its norm over the branch parameters of the first block, relative to the last block's, at
the start and at the end of training.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import jax
import numpy as np
import optax
from matplotlib.figure import Figure

from experiments.harness.figures import COLORS, panels, with_spread
from experiments.harness.jobs import Record, Training, looked_at, seeded
from experiments.harness.results import Summary
from experiments.harness.statistics import mean_interval
from nagjax.data import DataConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import find_scheme, register
from nagjax.residual.prenorm import PreNormStream
from nagjax.residual.schemes.review import Review
from nagjax.runs.config import OptimizerConfig, RunConfig
from nagjax.runs.opening import open_run
from nagjax.train.evaluator import Evaluator
from nagjax.train.loss import forward

WALL = 20  # sublayers
WHEN = ("start", "end")  # of training: when gradients are measured
BEHIND = 0.1  # nats: a convex run this far behind the additive one of its depth has failed
PAIRS = {"review": "review_convex", "highway": "highway_convex"}  # additive: convex


@register
@dataclasses.dataclass(frozen=True)
class ReviewConvex(Review):
    """`h <- (1 - r) * h + r * u` with the gate of Review Residuals."""

    name: ClassVar[str] = "review_convex"
    title: ClassVar[str] = "Review (convex)"

    def advance(self, stream: PreNormStream, update, at):
        after, gate = super().advance(stream, update, at)
        hidden = (after.hidden - gate * stream.hidden).astype(after.hidden.dtype)
        return PreNormStream(hidden, self.normalise(hidden, at)), gate


@dataclasses.dataclass(frozen=True)
class Settings:
    sublayers: tuple[int, ...]
    width: int
    context: int
    batch: int
    steps: int
    seeds: int
    lr: float | None = None  # None: each scheme's default
    eval_batches: int = 24
    schemes: tuple[str, ...] = ("review", "review_convex", "highway", "highway_convex")
    data: str = "stdlib"  # or a folder made by nagjax data prepare


SIZES = {
    "smoke": Settings((4,), 16, 16, 8, 4, 1, eval_batches=1, schemes=("review_convex",)),
    "cpu": Settings((12, 20, 28, 48), 64, 128, 8, 150, 1),
    "h200": Settings((12, 20, 28, 38, 48), 512, 256, 64, 1000, 1),
    "paper": Settings((12, 20, 28, 38, 48), 512, 256, 64, 8000, 3, lr=2e-4),
}


def plan(settings: Settings) -> list[Training]:
    return [
        Training(
            f"{scheme}-{sublayers}-s{seed}",
            {"scheme": scheme, "sublayers": sublayers, "seed": seed},
            seeded(_config(settings, scheme, sublayers), seed),
            gradients,
        )
        for seed in range(settings.seeds)
        for sublayers in settings.sublayers
        for scheme in settings.schemes
    ]


def _config(settings: Settings, scheme: str, sublayers: int) -> RunConfig:
    model = ModelConfig(depth=sublayers // 2, width=settings.width, context=settings.context)
    train = looked_at(settings.steps, settings.batch, settings.eval_batches, times=3)
    optimizer, data = OptimizerConfig(lr=settings.lr), DataConfig(path=settings.data)
    return RunConfig(find_scheme(scheme)(), model, optimizer, train, data)


def gradients(folder: Path) -> dict:
    """Gradient norms of the first and the last block's branches, with the start values and with the trained ones."""
    run = open_run(folder)
    batch = next(iter(Evaluator(run.blueprint).batches(1)))

    @jax.jit
    def norms(params):
        def mean_loss(params):
            sums, _ = forward(run.blueprint.model(params), batch, progress=1.0)
            return sums.nats / sums.count

        blocks = jax.grad(mean_loss)(params)["blocks"]
        branches = [blocks[kind]["branch"] for kind in ("attention", "mlp")]
        return [optax.tree.norm(jax.tree.map(lambda leaf, i=i: leaf[i], branches)) for i in (0, -1)]

    found = {}
    for when, params in (("start", run.blueprint.create_params()), ("end", run.params)):
        first, last = (float(norm) for norm in norms(params))
        found |= {f"first_gradient_{when}": first, f"last_gradient_{when}": last}
    return found


def _values(records: Sequence[Record], scheme: str, sublayers: int, read) -> list[float]:
    own = [r.metrics for r in records if (r.labels["scheme"], r.labels["sublayers"]) == (scheme, sublayers)]
    return [read(metrics) for metrics in own if metrics["loss"] is not None]


def _loss(metrics: dict) -> float:
    return metrics["loss"]


def _ratio(metrics: dict, when: str) -> float:
    return metrics[f"first_gradient_{when}"] / max(metrics[f"last_gradient_{when}"], 1e-30)


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    rows = []
    for scheme in settings.schemes:
        for depth in settings.sublayers:
            get = functools.partial(_values, records, scheme, depth)
            loss = get(_loss)
            if loss:
                shown = {f"gradient {when}": float(np.mean(get(functools.partial(_ratio, when=when)))) for when in WHEN}
                rows.append({"scheme": scheme, "sublayers": depth, "loss": str(mean_interval(loss))} | shown)
            else:
                shown = {f"gradient {when}": "" for when in WHEN}
                rows.append({"scheme": scheme, "sublayers": depth, "loss": "diverged"} | shown)
    gaps = {pair: _gaps(settings, records, *pair) for pair in PAIRS.items() if set(pair) <= set(settings.schemes)}
    told = []
    for (additive, convex), own in gaps.items():
        listed = ", ".join(f"{depth}: {gap:+.3f}" for depth, gap in own.items())
        told.append(f"{convex} minus {additive} by sublayers {listed}")
    if not told:
        told = [f"{row['scheme']} at {row['sublayers']} sublayers {row['loss']}" for row in rows]
    return Summary("; ".join(told) + " nats per token", _verdict(gaps.get(("review", "review_convex"), {})), rows)


def _gaps(settings: Settings, records: Sequence[Record], additive: str, convex: str) -> dict[int, float]:
    """Mean loss of the convex form minus that of the additive one, by sublayers; infinite where it diverged."""
    found = {}
    for depth in settings.sublayers:
        ours, theirs = (_values(records, scheme, depth, _loss) for scheme in (convex, additive))
        if theirs:
            found[depth] = float(np.mean(ours) - np.mean(theirs)) if ours else float("inf")
    return found


def _verdict(gaps: dict[int, float]) -> str:
    """By Review's pair: failed at every depth beyond the wall, and behind by more the deeper."""
    beyond = [gaps[depth] for depth in sorted(gaps) if depth > WALL]
    before = [gaps[depth] for depth in sorted(gaps) if depth <= WALL]
    if not beyond or not before:
        return "undecided"
    if min(beyond) > BEHIND and max(before) < BEHIND:
        return "supported"
    if max(beyond) < BEHIND:
        return "not supported"
    return "undecided"


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    figure, (losses, start, end) = panels(3, "Convex and additive gates by depth")
    for scheme, color in zip(settings.schemes, COLORS, strict=False):
        line = "--" if scheme.endswith("convex") else "-"
        ratios = {ax: functools.partial(_ratio, when=w) for ax, w in zip((start, end), WHEN, strict=True)}
        for ax, read in ({losses: _loss} | ratios).items():
            depths = [d for d in settings.sublayers if _values(records, scheme, d, _loss)]
            values = [_values(records, scheme, depth, read) for depth in depths]
            if depths and ax is losses:
                with_spread(ax, depths, values, color=color, linestyle=line, label=scheme)
            elif depths:
                ax.semilogy(depths, [np.mean(own) for own in values], line, marker="o", color=color)
    losses.set_ylabel("validation loss (nats per token)")
    losses.legend(frameon=False)
    for ax, when in zip((start, end), WHEN, strict=True):
        ax.set_title(f"gradient, first block / last block, at the {when}")
    for ax in (losses, start, end):
        ax.axvline(WALL, color="#cccccc", linewidth=1)
        ax.set_xlabel("sublayers")
    return figure


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
