"""Depth at equal width and tokens: does a scheme's lead over plain pre-norm grow with depth?

Claim: NAG beats plain pre-norm, and the gain grows with depth.
Source: Figliolia & Millidge 2026, arXiv:2606.16112; LayerNorm Scaling: Sun et al. 2025, arXiv:2502.05795; a sweep to
  120 blocks in which LayerNorm Scaling fades beyond 72: arXiv:2603.05369
Expected: NAG below plain at every depth, by more the deeper (no figures published); an independent dense
  re-implementation at equal FLOPs found NAG slightly behind, bits per byte of plain / NAG 0.899 / 0.938 at 26 blocks
  and 0.7503 / 0.7589 at 64
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: a TPU slice or 8 GPUs, one task per run
Time: smoke 15 s; cpu about 25 min, baselines 1.5 hours, with --processes 2; h200 and paper not measured
Command: python -m experiments.depth_scaling --processes 2

Width, batch and tokens are the same for all runs; parameters and FLOPs grow with depth, and schemes differ by the few
percent their gates take. The learning rate is tuned for every scheme and depth: each is trained at the scheme's default
for that depth (`Scheme.default_rate`) times every factor of the grid, and counts with its best; a best at the edge of
the grid is marked, for there the tuning is not finished. Speed-up of a scheme over plain at the same depth: the tokens
after which plain has a loss over the tokens after which the scheme has it, at the final loss of the worse of the two,
read off the validation curves (of one cosine schedule, so it flatters whoever learns faster early). The size
baselines is cpu with the baselines beside the four; paper has them too, the others take them from `--schemes` (`field`
has every scheme at 64 and 128 blocks).
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.harness.figures import COLORS, panels, with_spread
from experiments.harness.jobs import Record, Training, looked_at, seeded
from experiments.harness.results import Summary
from experiments.harness.statistics import Interval, paired_interval
from experiments.harness.tuning import Tuned, tuned
from nagjax.data import DataConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import find_scheme
from nagjax.runs.config import OptimizerConfig, RunConfig

PLAIN, JUDGED = "plain", "nag"
FOUR = (PLAIN, "lns", "review", JUDGED)
BASELINES = (
    *("post_ln", "deepnorm", "mix_ln", "sandwich", "peri_ln"),
    *("layer_scale", "skip_init", "rezero", "depth_scaled"),
)
ALL = (*FOUR, *BASELINES)


@dataclasses.dataclass(frozen=True)
class Settings:
    depths: tuple[int, ...]
    width: int
    context: int
    batch: int
    steps: int
    seeds: int
    schemes: tuple[str, ...] = FOUR
    factors: tuple[float, ...] = (0.5, 1.0, 2.0)  # of the scheme's default learning rate
    eval_batches: int = 24
    data: str = "stdlib"  # or a folder made by nagjax data prepare


CPU = Settings((8, 16, 32, 64, 128), 32, 64, 8, 120, 1, eval_batches=10)
SIZES = {
    "smoke": Settings((2, 4), 16, 16, 8, 4, 1, ("plain", "nag"), (1.0,), eval_batches=1),
    "cpu": CPU,
    "baselines": dataclasses.replace(CPU, schemes=ALL),
    "h200": Settings((8, 16, 32, 64, 128), 256, 512, 64, 400, 1),
    "paper": Settings((8, 16, 32, 64, 128), 640, 2048, 256, 10_000, 3, ALL, (0.25, 0.5, 1.0, 2.0)),
}


def plan(settings: Settings) -> list[Training]:
    return [
        Training(
            f"{scheme}-{depth}-x{factor:g}-s{seed}",
            {"scheme": scheme, "depth": depth, "factor": factor, "seed": seed},
            seeded(_config(settings, scheme, depth, factor), seed),
        )
        for seed in range(settings.seeds)
        for depth in settings.depths
        for factor in settings.factors
        for scheme in settings.schemes
    ]


def _config(settings: Settings, scheme: str, depth: int, factor: float) -> RunConfig:
    chosen = find_scheme(scheme)()
    model = ModelConfig(depth=depth, width=settings.width, context=settings.context)
    optimizer = OptimizerConfig(lr=factor * chosen.default_rate(settings.width, depth))
    train = looked_at(settings.steps, settings.batch, settings.eval_batches, times=10)
    return RunConfig(chosen, model, optimizer, train, DataConfig(path=settings.data))


def tokens_to(curve: Sequence[Sequence[float]], loss: float) -> float:
    """Tokens after which a validation curve [tokens, loss] first falls to `loss`, between its points linearly in the
    logarithm of the tokens; infinite if it never does."""
    before = None
    for tokens, value in curve:
        if tokens > 0 and value <= loss:
            if before is None or before[1] <= value:
                return float(tokens)
            share = (before[1] - loss) / (before[1] - value)
            return float(math.exp(math.log(before[0]) + share * (math.log(tokens) - math.log(before[0]))))
        if tokens > 0:
            before = (tokens, value)
    return math.inf


def speed_up(curve: Sequence[Sequence[float]], plain: Sequence[Sequence[float]]) -> float:
    """Above 1: the scheme reaches plain's final loss in fewer tokens; below 1: plain reaches the scheme's."""
    loss = max(curve[-1][1], plain[-1][1])
    return tokens_to(plain, loss) / tokens_to(curve, loss)


def _best(settings: Settings, records: Sequence[Record]) -> dict[tuple[str, int], Tuned]:
    pairs = [(scheme, depth) for scheme in settings.schemes for depth in settings.depths]
    found = {(s, d): tuned(records, settings.factors, scheme=s, depth=d) for s, d in pairs}
    return {pair: one for pair, one in found.items() if one is not None}


def _speed_ups(one: Tuned, plain: Tuned) -> list[float]:
    shared = sorted(one.runs.keys() & plain.runs.keys())
    return [speed_up(one.runs[seed]["curve"], plain.runs[seed]["curve"]) for seed in shared]


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    best = _best(settings, records)
    gains = {
        depth: paired_interval(best[PLAIN, depth].losses, best[JUDGED, depth].losses)
        for depth in settings.depths
        if (PLAIN, depth) in best and (JUDGED, depth) in best
    }
    rows = [_row(best, scheme, depth) for scheme in settings.schemes for depth in settings.depths]
    told = ", ".join(f"{depth}: {gain.estimate:+.4f}" for depth, gain in gains.items())
    text = f"plain minus NAG by blocks {told} nats per token, each at its best rate ({settings.seeds} seeds)"
    leads = [f"{depth}: {_winner(settings, best, depth)}" for depth in settings.depths]
    slope = _slope(gains)
    return Summary(
        f"{text}; lowest loss by blocks {', '.join(leads)}",
        _verdict(gains, slope),
        rows,
        {"gain_per_doubling": slope, "at_the_grid_edge": [f"{s}-{d}" for (s, d), one in best.items() if one.edge]},
    )


def _winner(settings: Settings, best: dict[tuple[str, int], Tuned], depth: int) -> str:
    own = {scheme: best[scheme, depth].loss.estimate for scheme in settings.schemes if (scheme, depth) in best}
    return min(own, key=own.get) if own else "none"


def _slope(gains: dict[int, Interval]) -> float | None:
    """Gain in nats per doubling of the depth, by least squares."""
    if len(gains) < 2:
        return None
    return float(np.polyfit(np.log2(list(gains)), [gain.estimate for gain in gains.values()], 1)[0])


def _verdict(gains: dict[int, Interval], slope: float | None) -> str:
    """On means; with one seed per depth nothing more can be said than whether all depths agree."""
    if slope is None:
        return "undecided"
    values = [gain.estimate for gain in gains.values()]
    if slope > 0 and min(values) > 0:
        return "supported"
    if slope <= 0 or max(values) <= 0:
        return "not supported"
    return "undecided"


def _row(best: dict[tuple[str, int], Tuned], scheme: str, depth: int) -> dict:
    head, one = {"scheme": scheme, "blocks": depth}, best.get((scheme, depth))
    if one is None:
        return head | dict.fromkeys(("lr x", "loss", "growth", "late turn", "speed-up"), "diverged")
    mean = lambda name: float(np.mean([run[name] for run in one.runs.values()]))  # noqa: E731
    plain = best.get((PLAIN, depth))
    return head | {
        "lr x": f"{one.factor:g}{' (edge)' if one.edge else ''}",
        "loss": str(one.loss),
        "growth": mean("growth"),
        "late turn": mean("late_turn_degrees"),
        "speed-up": float(np.mean(_speed_ups(one, plain))) if plain and scheme != PLAIN else "",
    }


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    best = _best(settings, records)
    figure, (losses, gains, turns) = panels(3, "Depth at equal width and tokens, each scheme at its best learning rate")
    for scheme, color in zip(settings.schemes, COLORS, strict=False):
        depths = [depth for depth in settings.depths if (scheme, depth) in best]
        if not depths:
            continue
        own = [best[scheme, depth] for depth in depths]
        with_spread(losses, depths, [list(one.losses.values()) for one in own], color=color, label=scheme)
        turned = [float(np.mean([run["late_turn_degrees"] for run in one.runs.values()])) for one in own]
        turns.plot(depths, turned, marker="o", color=color)
        paired = [(d, one) for d, one in zip(depths, own, strict=True) if (PLAIN, d) in best and scheme != PLAIN]
        if paired:
            lead = [[best[PLAIN, d].losses[s] - loss for s, loss in one.losses.items()] for d, one in paired]
            with_spread(gains, [d for d, _ in paired], lead, color=color)
    gains.axhline(0, color="#999999", linewidth=1)
    losses.set_ylabel("validation loss (nats per token)")
    gains.set_ylabel("plain's loss minus the scheme's (above 0: ahead)")
    turns.set_ylabel("turn of the last quarter of sublayers (degrees)")
    turns.set_yscale("log")
    for ax in (losses, gains, turns):
        ax.set_xscale("log", base=2)
        ax.set_xticks(settings.depths, [str(depth) for depth in settings.depths])
        ax.set_xlabel("blocks")
    figure.legend(*losses.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
