"""Skipping after training: the loss against the FLOPs that are left, by what is skipped.

Claim: In a densely trained NAG model, the coming rotation's angle tells which (token, sublayer) pairs to skip.
Source: Figliolia & Millidge 2026, arXiv:2606.16112 (skipping by the residual's geometry as a tradeoff of accuracy and
  compute after training, rates of 20-25%); blocks of least influence: Men et al. 2024, arXiv:2403.03853
Expected: with 20% and 25% of the pairs skipped by angle, a lower loss than three rivals have at the same forward FLOPs:
  skipping at random, leaving out the last blocks, leaving out the blocks of least influence (no figures published for
  skipping after training)
Hardware: smoke, cpu and long: 2 CPU cores; h200: one GPU; paper: 8 GPUs or a TPU slice, one task per run
Time: smoke 15 s; cpu about 11 min with --processes 2, long about 45 min; h200 and paper not measured
Command: python -m experiments.calibrated_skipping --processes 2 --size long
Known: long: the result of the nearest rival, other tokens by sublayer, which the claim names since 2026-11-26

In full: at equal FLOPs, skipping by the angle raises the loss less than skipping at random does, and less than leaving
out whole blocks. Since 2026-11-26 the claim also says: less than skipping other tokens in the same sublayers. That
result was known when it was added.

Every run has the training FLOPs of the dense NAG run. The dense runs, NAG and plain, are not trained further. What they
lose by skipping is read off at equal forward FLOPs per token (closed form, with the scores of a router counted),
linearly between the points of a curve. Ways to skip: by NAG's angle, with one threshold for the whole network, searched
on training text; other tokens at random, as many in each sublayer as the angle skips, which tells what the choice of
tokens is worth; at random everywhere; the last blocks; the blocks of least influence. Beside them stands what else the
FLOPs could have bought: NAG trained with Mixture-of-Depths at one rate and set to others, by one threshold or by its
own thresholds times a factor, and NAG with fewer blocks from the start. Differences are paired by seed.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiments.harness.figures import COLORS, panels, with_spread
from experiments.harness.jobs import Record, Training, looked_at, seeded
from experiments.harness.matching import train_flops, with_flops
from experiments.harness.results import Summary
from experiments.harness.skipping import LINEAR, Point, Skipping, on_curve, on_every_curve
from experiments.harness.statistics import mean_interval
from experiments.harness.verdicts import Gap
from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.measure.cuts import Cutter, choose
from nagjax.mod import ModConfig
from nagjax.model.config import ModelConfig
from nagjax.ranges import Count, Natural
from nagjax.report.curve import text_batches
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig
from nagjax.runs.facts import model_costs
from nagjax.runs.opening import OpenRun, open_run
from nagjax.train.evaluator import Evaluator
from nagjax.train.loss import Batch

RATES = (0.1, 0.2, 0.25, 0.35, 0.5)  # shares of the (token, sublayer) pairs
CUTS = (1 / 12, 1 / 6, 1 / 4, 1 / 3, 1 / 2)  # shares of the blocks
CLAIMED = (0.2, 0.25)
SEARCHED = 2  # batches of training text that thresholds are searched on and blocks are judged on
WAYS = {
    "angle": "by angle, one threshold",
    "tokens": "other tokens, as many by sublayer",
    "random": "at random",
    "late": "the last blocks",
    "influence": "blocks of least influence",
    "own": "by angle, its own thresholds",
    "scratch": "fewer blocks from the start",
}
CONTROLS = ("tokens", "random", "late", "influence")  # that the angle has to beat; the first since its result was known
CURVES = {  # by kind of run
    "nag": ("angle", "tokens", "random", "late", "influence"),
    "plain": ("random", "late", "influence"),
    "routed": ("angle", "own"),
    "short": ("scratch",),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Steps are those of the dense NAG model; they set the budget of all runs."""

    depth: Count
    width: Count
    context: Count
    batch: Count
    steps: Count
    seeds: Natural
    kinds: tuple[str, ...] = (
        "nag",
        "plain",
        "routed",
        "short",
    )  # of models: dense ones, trained with skipping, and with fewer blocks
    rate: float = 0.25  # of the routed runs' training
    fewer: tuple[float, ...] = (0.75,)  # shares of the blocks that short runs have
    eval_batches: Count = 12
    data: str = "stdlib"  # or a folder made by nagjax data prepare


SIZES = {
    "smoke": Settings(2, 16, 16, 8, 4, 1, ("nag",), eval_batches=1),
    "cpu": Settings(12, 64, 128, 8, 200, 3),
    "long": Settings(12, 64, 128, 8, 5000, 5, ("nag",), eval_batches=32),
    "h200": Settings(24, 512, 512, 64, 600, 5),
    "paper": Settings(64, 512, 1024, 64, 16_000, 5, fewer=(0.5, 0.75), eval_batches=24),
}


def plan(settings: Settings) -> list[Training]:
    if "nag" not in settings.kinds or not set(settings.kinds) <= CURVES.keys():
        fix = f"choose from {', '.join(CURVES)}, with nag, which the others are compared with"
        raise UserError("kinds", settings.kinds, fix)
    budget = train_flops(_config(settings, "nag", 1.0))
    shares = {kind: settings.fewer if kind == "short" else (1.0,) for kind in settings.kinds}
    arms = [(kind, share) for kind, own in shares.items() for share in own]
    configs = {arm: with_flops(_config(settings, *arm), budget) for arm in arms}
    return [
        Training(
            f"{kind}{100 * share:g}-s{seed}" if kind == "short" else f"{kind}-s{seed}",
            {"kind": kind, "blocks": configs[kind, share].model.depth, "seed": seed},
            seeded(configs[kind, share], seed),
            whole if kind == "short" else dialled,
        )
        for seed in range(settings.seeds)  # whole comparisons first, should time run out
        for kind, share in arms
    ]


def _config(settings: Settings, kind: str, share: float) -> RunConfig:
    mod = ModConfig(rate=(settings.rate,), router="nag") if kind == "routed" else ModConfig()
    depth = max(round(settings.depth * share), 1)
    model = ModelConfig(depth=depth, width=settings.width, context=settings.context, mod=mod)
    train = looked_at(settings.steps, settings.batch, settings.eval_batches, times=4)
    scheme = find_scheme("plain" if kind == "plain" else "nag")()
    return RunConfig(scheme, model, train=train, data=DataConfig(path=settings.data))


def whole(folder: Path) -> dict:
    """The one point of a run that skips nothing."""
    run = open_run(folder)
    text = Evaluator(run.blueprint)
    found, _ = text(run.params, run.mod, run.step, text.batches(run.config.train.eval_batches))
    return {"curves": {"scratch": [Point(0.0, model_costs(run.blueprint).forward, found["loss"], found["accuracy"])]}}


def dialled(folder: Path) -> dict:
    """Curves of a run by way of skipping, each a list of `Point`s that begins with nothing skipped; the thresholds of
    the angle's points, and the shares of the tokens that ran at them, by sublayer."""
    run = open_run(folder, calibrated=False)
    at_random = Skipping(run, "random")
    text = text_batches(run, None, "train", SEARCHED)
    held_out = list(at_random.evaluator.batches(run.config.train.eval_batches))
    found = {"curves": {}}
    if run.config.scheme.turns:
        found = _by_angle(run, at_random, text, held_out)
    if not run.config.model.mod.active:
        found["curves"] |= _uninformed(run, at_random, text, held_out)
    full = [at_random.without((), held_out)]
    return found | {"curves": {way: full + points for way, points in found["curves"].items()}}


def _by_angle(run: OpenRun, at_random: Skipping, text: list[Batch], held_out: list[Batch]) -> dict:
    """By thresholds on NAG's angle; where the run has some of its own, by multiples of those, too."""
    by_angle = Skipping(run, "nag")
    factors = [by_angle.factor(np.ones(1), rate, text) for rate in RATES]
    points, ran = zip(*(by_angle.point(factor * np.ones(1), held_out) for factor in factors), strict=True)
    curves = {"angle": list(points)}
    if "cuts" in run.mod:
        own = np.asarray(run.mod["cuts"])
        curves["own"] = [by_angle.point(by_angle.factor(own, rate, text) * own, held_out)[0] for rate in RATES]
    else:
        curves["tokens"] = [at_random.point(1.0 - shares.ravel(), held_out)[0] for shares in ran]
    executed = [[round(float(share), 4) for share in shares.ravel()] for shares in ran]
    return {"curves": curves, "thresholds": factors, "executed": executed}


def _uninformed(run: OpenRun, at_random: Skipping, text: list[Batch], held_out: list[Batch]) -> dict:
    depth = at_random.depth
    counts = sorted({max(round(depth * share), 1) for share in CUTS})
    cosine, angle = Cutter(run).measure(text)
    gone = lambda way: [choose(way, count, cosine, angle) for count in counts]  # noqa: E731
    return {"random": [at_random.point(np.full(1, rate), held_out)[0] for rate in RATES]} | {
        way: [at_random.without(blocks, held_out) for blocks in gone(way)] for way in ("late", "influence")
    }


def curves(records: Sequence[Record], kind: str, way: str) -> dict[int, list]:
    """By seed; of short runs the points of all depths, with the dense run's."""
    found: dict[int, list] = {}
    for record in records:
        if record.labels["kind"] == kind and record.metrics["loss"] is not None:
            found.setdefault(record.labels["seed"], []).extend(record.metrics["curves"].get(way, []))
    if kind == "short":
        dense = curves(records, "nag", "angle")
        found = {seed: [*points, *dense.get(seed, [])[:1]] for seed, points in found.items()}
    return {seed: points for seed, points in found.items() if points}


def added(records: Sequence[Record], kind: str, way: str, rate: float, curve: str = LINEAR) -> dict[int, float]:
    """By seed that came through: loss over the dense run's of the same scheme and seed, at the share of its forward
    FLOPs to which NAG comes with this share of the pairs skipped by angle."""
    base = curves(records, "plain" if kind == "plain" else "nag", "random")
    angle, found = curves(records, "nag", "angle"), {}
    for seed, points in curves(records, kind, way).items():
        if seed in base and seed in angle:
            share = _share(angle[seed], rate)
            dense = Point(*base[seed][0])
            found[seed] = on_curve(points, share * dense.flops, curve=curve) - dense.loss
    return found


def _share(points: Sequence, rate: float) -> float:
    """Of the FLOPs with nothing skipped, at one of `RATES`."""
    return Point(*points[1 + RATES.index(rate)]).flops / Point(*points[0]).flops


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    rows = [_row(records, kind, way) for kind in settings.kinds for way in CURVES[kind]]
    gaps = {rate: _gaps(records, rate, LINEAR) for rate in CLAIMED}
    told = []
    for rate, own in gaps.items():
        share = mean_interval([_share(points, rate) for points in curves(records, "nag", "angle").values()]).estimate
        loss = mean_interval(list(added(records, "nag", "angle", rate).values()))
        against = ", ".join(f"{WAYS[way]} {_signed(gap)}" for way, gap in own.items())
        told.append(f"{rate:.0%} skipped by angle, {share:.0%} of the FLOPs: loss +{loss}; against it {against}")
    text = f"NAG, {'; '.join(told)} nats per token (95% over {settings.seeds} seeds)"
    every = [gap for own in gaps.values() for gap in own.values()]
    nearest = min((gap for gap in every if gap.values), key=lambda gap: gap.middle, default=None)
    head = f"{nearest.name} against the angle: {nearest} nats" if nearest else ""
    verdict, reasons = on_every_curve(lambda c: [gap for rate in CLAIMED for gap in _gaps(records, rate, c).values()])
    return Summary(text, verdict, rows, {"within_one_model": True}, head, reasons)


def _gaps(records: Sequence[Record], rate: float, curve: str) -> dict[str, Gap]:
    """By control: what it loses more than the angle does, at equal FLOPs. A model that diverged counts for neither."""
    lost = {r.labels["seed"]: None for r in records if r.labels["kind"] == "nag" and r.metrics["loss"] is None}
    own = lambda way: lost | added(records, "nag", way, rate, curve)  # noqa: E731
    return {way: Gap.of(f"{WAYS[way]} at {rate:.0%}", own(way), own("angle")) for way in CONTROLS}


def _signed(gap: Gap) -> str:
    return f"{'+' if gap.middle >= 0 else ''}{gap.interval or gap}"


def _row(records: Sequence[Record], kind: str, way: str) -> dict:
    own = {rate: list(added(records, kind, way, rate).values()) for rate in RATES}
    cell = lambda rate: str(mean_interval(own[rate])) if rate in CLAIMED else float(np.mean(own[rate]))  # noqa: E731
    return {"run": kind, "skipped": WAYS[way], "runs": len(own[RATES[0]])} | {
        f"+ at {rate:.0%}": cell(rate) if own[rate] else "" for rate in RATES
    }


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    titles = ["NAG", *(["plain pre-norm"] if "plain" in settings.kinds else []), "NAG"]
    figure, axes = panels(len(titles), "Skipping after training: no run is trained further")
    nag, plain, accuracy = axes[0], axes[-2], axes[-1]
    colors = dict(zip(WAYS, COLORS, strict=False))
    for kind in settings.kinds:
        for way in CURVES[kind]:
            found = list(curves(records, kind, way).values())
            for ax, field in ((plain if kind == "plain" else nag, "loss"), (accuracy, "accuracy")):
                if found and not (kind == "plain" and field == "accuracy"):
                    label = WAYS[way] if kind != "routed" else f"trained routed: {WAYS[way]}"
                    style = {"color": colors[way], "linestyle": "--" if kind == "routed" else "-", "label": label}
                    _curve(ax, records, found, kind, field, **style)
    for ax, title in zip(axes, titles, strict=True):
        ax.set_title(title)
        ax.set_xlabel("forward FLOPs of the dense model that are left")
        ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        ax.invert_xaxis()
    nag.set_ylabel("validation loss (nats per token)")
    accuracy.set_ylabel("share of tokens guessed")
    nag.legend(frameon=False, fontsize=8)
    return figure


def _curve(ax: Axes, records: Sequence[Record], found: list, kind: str, field: str, **style) -> None:
    """A field over seeds at every point against its share of the dense run's FLOPs."""
    base = curves(records, "plain" if kind == "plain" else "nag", "random")
    dense = Point(*next(iter(base.values()))[0]).flops if base else 1.0
    complete = [own for own in found if len(own) == max(map(len, found))]  # a short run may have diverged
    points = [[Point(*point) for point in own] for own in complete]
    shares = np.mean([[point.flops / dense for point in own] for own in points], axis=0)
    order = np.argsort(shares)
    values = [[getattr(own[at], field) for own in points] for at in order]
    with_spread(ax, shares[order], values, markersize=4, **style)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
