"""What should a trained model skip? Signals for it at equal FLOPs, and what training changes in them.

Claim: A linear fit to the loss's squared gain tells what to skip better than NAG's angle and than chance.
Source: angles: Figliolia & Millidge 2026, arXiv:2606.16112; gains and their squares: Molchanov et al. 2017 and 2019,
  arXiv:1611.06440 and arXiv:1906.10771, who prune channels by them; gains by token and sublayer, and fits to them, are
  this project's
Expected: a loss below the angle's and below that of other tokens, as many by sublayer, at 85% and 80% of the FLOPs (no
  figures published)
Hardware: smoke, cpu and long: 2 CPU cores; h200: one GPU
Time: smoke under a minute; cpu about 30 min with --processes 2, long about 60 min; h200 not measured
Command: python -m experiments.mod_signals --processes 2
Known: long: the same models' result with fewer rates, whose verdict depended on the curve drawn through them

Dense NAG models, trained for ever longer, then skip the (token, sublayer) pairs whose score is below one threshold for
the whole network, searched on training text. Nothing is trained further. Signals that are available when sampling:

- angle: NAG's tangent t of the coming rotation.
- scaled: t times the root of the ratio of its sublayer's mean squared gain to its mean t^2. A gain is how much the loss
  would rise without the update, to first order (`harness/signals.py`); gains and squares are per FLOP that the skipping
  saves.
- learned: a linear function of the direction that the sublayer reads, fitted to the logarithm of the squared gain.
- first: the same, fitted to the gain.
- sublayers: whole sublayers of least mean squared gain, for all tokens; no token is scored.
- random.

One signal is not available when sampling: oracle, the gains themselves, which look at the labels of the very text that
is judged. `tokens` controls tell what the choice of tokens is worth: as many of each sublayer as the signal takes,
drawn at random. All losses are read at equal forward FLOPs, linearly between points; the cost of scores is included
(the oracle's are free). Between distant points such a reading is too high, as the curves bend upwards: the committed
result of size cpu has rates of 10, 20 and 30% alone. Where a monotone cubic through the same points gives another
verdict, nothing is decided. Means are over training text, of which thresholds see the first batches.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiments.harness.figures import COLORS, panels, with_spread
from experiments.harness.jobs import Record, Training, looked_at, seeded
from experiments.harness.results import Summary
from experiments.harness.settings import brief, check_ascending
from experiments.harness.signals import Signals
from experiments.harness.skipping import LINEAR, Point, on_curve, on_every_curve
from experiments.harness.statistics import mean_interval
from experiments.harness.verdicts import Gap
from nagjax.data import DataConfig
from nagjax.model.config import ModelConfig
from nagjax.ranges import Count, Natural
from nagjax.report.curve import text_batches
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig
from nagjax.runs.opening import open_run
from nagjax.train.evaluator import Evaluator

RATES = (0.1, 0.15, 0.2, 0.25, 0.3)
READ = (0.85, 0.8)  # shares of the FLOPs at which losses are compared
SEARCHED = 2  # batches of training text that thresholds are searched on
WAYS = {
    "angle": "by angle",
    "angle_tokens": "other tokens, as many by sublayer as by angle",
    "scaled": "by angle times its sublayer's gain",
    "learned": "by the fitted squared gain",
    "learned_tokens": "other tokens, as many by sublayer as by the fitted square",
    "first": "by the fitted gain",
    "sublayers": "sublayers of least squared gain",
    "random": "at random",
    "oracle": "by the gain itself (oracle)",
}
RIVALS = ("angle", "angle_tokens", "learned_tokens")  # of the fitted squared gain


@dataclasses.dataclass(frozen=True)
class Settings:
    depth: Count
    width: Count
    context: Count
    batch: Count
    steps: tuple[Count, ...]  # of the runs, ascending; the claim is about the longest
    seeds: Natural
    fitted: Count = 16  # batches of training text that gains are averaged over and fitted on
    eval_batches: Count = 12
    data: str = "stdlib"  # or a folder made by nagjax data prepare


SIZES = {
    "smoke": Settings(2, 16, 16, 8, (4,), 1, fitted=2, eval_batches=1),
    "cpu": Settings(12, 64, 128, 8, (200, 1000), 5),
    "long": Settings(12, 64, 128, 8, (5000,), 5, eval_batches=32),
    "h200": Settings(24, 512, 512, 64, (256, 2048), 5),
}


def plan(settings: Settings) -> list[Training]:
    check_ascending("steps", settings.steps)
    return [
        Training(
            f"{steps}-s{seed}",
            {"steps": steps, "seed": seed},
            seeded(_config(settings, steps), seed),
            Skipped(settings.fitted, RATES),
        )
        for seed in range(1, settings.seeds + 1)  # on seed 0 what is fitted was chosen; whole comparisons first
        for steps in settings.steps
    ]


def _config(settings: Settings, steps: int) -> RunConfig:
    model = ModelConfig(depth=settings.depth, width=settings.width, context=settings.context)
    train = looked_at(steps, settings.batch, settings.eval_batches, times=4)
    return RunConfig(find_scheme("nag")(), model, train=train, data=DataConfig(path=settings.data))


@dataclasses.dataclass(frozen=True)
class Skipped:
    """Measures a run's folder: curves by way, each a list of `Point`s that begins with nothing skipped; correlations
    with the log squared gains of held-out text, mean over sublayers; mean squared gains by sublayer."""

    fitted: int
    rates: tuple[float, ...]  # shares of the pairs

    def __call__(self, folder: Path) -> dict:
        run = open_run(folder, calibrated=False)
        signals, validation = Signals(run), Evaluator(run.blueprint)
        text = text_batches(run, None, "train", self.fitted)
        held_out = list(validation.batches(run.config.train.eval_batches))
        seen, there = signals.see(text), signals.see(held_out)
        scaled, learned, first = signals.scaled(seen), signals.fitted(seen, text), signals.first_order(seen, text)
        search, counts = text[:SEARCHED], signals.counts(self.rates[-1])
        known = [signals.worth(s.gains) for s in (*seen[:SEARCHED], *there)]
        found = {
            "angle": signals.points(signals.turned(), self.rates, search, held_out, multiply_adds=signals.gate),
            "scaled": signals.points(scaled, self.rates, search, held_out, multiply_adds=signals.gate),
            "learned": signals.points(learned, self.rates, search, held_out, multiply_adds=run.config.model.width),
            "first": signals.points(first, self.rates, search, held_out, multiply_adds=run.config.model.width),
            "oracle": signals.points(signals.nothing(), self.rates, search, held_out, known=known),
            "sublayers": [signals.without(signals.least(seen, count), held_out) for count in counts],
            "random": [signals.others(np.full(signals.shape, 1.0 - rate), held_out) for rate in self.rates],
        }
        for way in ("angle", "learned"):
            found[f"{way}_tokens"] = [signals.others(ran, held_out) for _, ran in found[way]]
        full, _ = signals.without(np.zeros(signals.shape), held_out)
        return {
            "curves": {way: [full, *(point for point, _ in own)] for way, own in found.items()},
            "executed": {way: np.round([ran.ravel() for _, ran in own], 4).tolist() for way, own in found.items()},
            "squares": [float(f"{value:.4g}") for value in signals.mean_square(seen).ravel()],
            "correlation": {
                name: round(signals.correlation(signal, there), 4)
                for name, signal in (("angle", signals.turned()), ("learned", learned))
            },
        }


def added(records: Sequence[Record], steps: int, way: str, share: float, curve: str = LINEAR) -> dict[int, float]:
    """By seed that came through: loss over the dense model's, at this share of its forward FLOPs."""
    found = {}
    for record in records:
        if record.labels["steps"] == steps and record.metrics["loss"] is not None:
            points = record.metrics["curves"][way]
            dense = Point(*points[0])
            found[record.labels["seed"]] = on_curve(points, share * dense.flops, curve=curve) - dense.loss
    return found


def gaps(records: Sequence[Record], steps: int, curve: str = LINEAR) -> list[Gap]:
    """What the fitted square's rivals lose more than it does, at equal FLOPs. A model that diverged counts for none."""
    lost = {r.labels["seed"]: None for r in records if r.labels["steps"] == steps and r.metrics["loss"] is None}
    own = lambda way, share: lost | added(records, steps, way, share, curve)  # noqa: E731
    return [
        Gap.of(f"{WAYS[way]}, {share:.0%}", own(way, share), own("learned", share)) for share in READ for way in RIVALS
    ]


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    rows = [_row(settings, records, steps, way) for steps in settings.steps for way in WAYS]
    told = []
    for steps in settings.steps:
        loss = mean_interval(list(added(records, steps, "learned", READ[0]).values()))
        against = ", ".join(f"{gap.name} {gap}" for gap in gaps(records, steps))
        agree = ", ".join(
            f"{name} {mean_interval(own).estimate:.2f}" for name, own in _correlations(records, steps).items()
        )
        tokens = brief(_tokens(settings, steps))
        told.append(
            f"{tokens} tokens: by the fitted square +{loss} at {READ[0]:.0%}; against it {against}; "
            f"correlation with the log square: {agree}"
        )
    last = gaps(records, settings.steps[-1])
    nearest = min((gap for gap in last if gap.values), key=lambda gap: gap.middle, default=None)
    head = f"{nearest.name}, against the fitted square: {nearest} nats" if nearest else ""
    text = f"{'; '.join(told)} (nats per token, 95% over {settings.seeds} seeds)"
    verdict, reasons = on_every_curve(lambda curve: gaps(records, settings.steps[-1], curve))
    return Summary(text, verdict, rows, {"within_one_model": True}, head, reasons)


def _tokens(settings: Settings, steps: int) -> int:
    return steps * settings.batch * settings.context


def _correlations(records: Sequence[Record], steps: int) -> dict[str, list[float]]:
    own = [r.metrics["correlation"] for r in records if r.labels["steps"] == steps and r.metrics["loss"] is not None]
    return {name: [found[name] for found in own] for name in ("angle", "learned")}


def _row(settings: Settings, records: Sequence[Record], steps: int, way: str) -> dict:
    row = {"tokens": brief(_tokens(settings, steps)), "skipped": WAYS[way]}
    return row | {
        f"+ at {share:.0%} of the FLOPs": str(mean_interval(list(added(records, steps, way, share).values())))
        for share in READ
    }


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    several = len(settings.steps) > 1
    figure, axes = panels(len(settings.steps) + several, "What to skip after training, told when sampling")
    colors = {way: color for way, color in zip(WAYS, COLORS, strict=False) if way != "oracle"}
    for ax, steps in zip(axes, settings.steps, strict=False):
        for way in colors:
            own = [r.metrics for r in records if r.labels["steps"] == steps and r.metrics["loss"] is not None]
            points = np.array([metrics["curves"][way] for metrics in own])  # [seed, point, field]
            if len(points):
                flops, loss = points[..., 1] / points[:, :1, 1], points[..., 2] - points[:, :1, 2]
                style = {"linestyle": ":" if way.endswith("_tokens") else "-", "color": colors[way], "label": WAYS[way]}
                with_spread(ax, flops.mean(axis=0), loss.T, markersize=4, **style)
        ax.set_title(f"{brief(_tokens(settings, steps))} tokens")
        ax.set_xlabel("forward FLOPs of the dense model that are left")
        ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        ax.invert_xaxis()
        ax.set_yscale("symlog", linthresh=0.05)
    axes[0].set_ylabel("loss added (nats per token), logarithmic above 0.05")
    if axes[0].lines:  # where every run diverged there is none
        axes[0].legend(frameon=False, fontsize=7)
    for way in colors if several else ():
        values = [list(added(records, steps, way, READ[1]).values()) for steps in settings.steps]
        if all(values):
            tokens = [_tokens(settings, steps) for steps in settings.steps]
            style = {"linestyle": ":" if way.endswith("_tokens") else "-", "color": colors[way]}
            with_spread(axes[-1], tokens, values, markersize=4, **style)
    if several:
        axes[-1].set_xscale("log")
        axes[-1].set_title(f"at {READ[1]:.0%} of the FLOPs")
        axes[-1].set_xlabel("tokens trained")
    return figure


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
