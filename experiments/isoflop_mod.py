"""Mixture-of-Depths at equal training FLOPs: skip more, train on more tokens.

Claim: at equal training FLOPs NAG with 20-25% of its (token, sublayer) pairs skipped matches the dense model.
Source: Figliolia & Millidge 2026, arXiv:2606.16112 (rates); Raposo et al. 2024, arXiv:2404.02258 (linear router)
Expected: loss at rates 20% and 25% within 0.5% of rate 0 or below; a random router clearly worse than NAG's own
Hardware: smoke and cpu: 2 CPU cores; h200, h200-350M: one H200; paper (1B): a TPU slice, one task per run
Time: smoke 15 s; cpu under 30 min with --processes 2; h200 and paper not measured
Command: python -m experiments.isoflop_mod --processes 2

All runs of a size have the same parameters, batch and training FLOPs (closed form, tested against XLA's count), so a
run at a higher rate takes more steps, over more tokens, with the same schedule stretched. Arms: NAG by its own angle,
plain pre-norm by a linear router, NAG by random choice as the control. The loss is the validation loss under top-k, as
in training; the loss under the causal decider (moving-average thresholds) stands beside it. Differences are paired by
seed: same start, same data order.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from experiments.harness.figures import COLORS, panels, with_spread
from experiments.harness.jobs import Record, Training, looked_at, seeded
from experiments.harness.matching import train_flops, with_flops
from experiments.harness.results import Summary
from experiments.harness.statistics import Interval, mean_interval, paired_interval
from nagjax.data import DataConfig, open_dataset
from nagjax.generate.evaluate import score
from nagjax.mod import ModConfig
from nagjax.model.config import ModelConfig
from nagjax.model.presets import find_preset
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig
from nagjax.runs.opening import open_run

CLAIMED = (0.2, 0.25)
MARGIN = 0.005  # relative: a loss at most this much above the dense one matches it
ARMS = {"nag": ("nag", "nag"), "plain": ("plain", "linear"), "random": ("nag", "random")}  # scheme, router
TITLES = {"nag": "NAG, own angle", "plain": "plain, linear router", "random": "NAG, random choice"}


@dataclasses.dataclass(frozen=True)
class Settings:
    """Steps are those of the dense NAG model; they set the budget of all runs."""

    depth: int
    width: int
    context: int
    batch: int
    steps: int
    seeds: int
    nag: tuple[float, ...] = (0.0, 0.125, 0.2, 0.25, 0.375, 0.5)  # rates by arm
    plain: tuple[float, ...] = (0.0, 0.125, 0.2, 0.25, 0.375, 0.5)
    random: tuple[float, ...] = (0.25,)
    eval_batches: int = 24
    data: str = "stdlib"  # or a folder made by nagjax data prepare


def _preset(name: str, **settings) -> Settings:
    return Settings(**dataclasses.asdict(find_preset(name)) | settings)


SIZES = {
    "smoke": Settings(2, 16, 32, 8, 6, seeds=1, nag=(0.0, 0.25), plain=(), random=(), eval_batches=1),
    "cpu": Settings(12, 64, 128, 8, 240, seeds=3, plain=(0.0, 0.25, 0.5)),
    "h200": _preset("60M", batch=64, steps=400, seeds=1, plain=(0.0, 0.25, 0.5)),
    "h200-350M": _preset("350M", batch=64, steps=3000, seeds=1, plain=(0.0, 0.25)),
    "paper": _preset("1B", batch=512, steps=20_000, seeds=3),
}


def plan(settings: Settings) -> list[Training]:
    budget = train_flops(_config(settings, "nag", 0.0))
    arms = [(arm, rate) for arm in ARMS for rate in getattr(settings, arm)]
    configs = {(arm, rate): with_flops(_config(settings, arm, rate), budget) for arm, rate in arms}
    return [
        Training(
            f"{arm}-{100 * rate:g}-s{seed}",
            {"arm": arm, "rate": rate, "seed": seed},
            seeded(configs[arm, rate], seed),
            causal_scores if rate else None,
        )
        for seed in range(settings.seeds)  # whole comparisons first, should time run out
        for arm, rate in arms
    ]


def _config(settings: Settings, arm: str, rate: float) -> RunConfig:
    scheme, router = ARMS[arm]
    mod = ModConfig(rate=(rate,), router=router) if rate else ModConfig()
    model = ModelConfig(depth=settings.depth, width=settings.width, context=settings.context, mod=mod)
    train = looked_at(settings.steps, settings.batch, settings.eval_batches, times=4)
    return RunConfig(find_scheme(scheme)(), model, train=train, data=DataConfig(path=settings.data))


def causal_scores(folder: Path) -> dict:
    """Loss and realised rate under the causal decider, on the run's validation batches."""
    run = open_run(folder)
    dataset = open_dataset(run.config.data, split="validation")
    scores, _ = score(run, dataset, run.config.train.eval_batches, causal=True)
    return {"causal_loss": scores["loss"], "causal_rate": scores["mod_rate"]}


def _losses(records: Sequence[Record], arm: str, rate: float) -> dict[int, float]:
    """By seed; runs that diverged are missing."""
    return {r.labels["seed"]: r.metrics["loss"] for r in _of(records, arm, rate) if r.metrics["loss"] is not None}


def _of(records: Sequence[Record], arm: str, rate: float) -> list[Record]:
    return [r for r in records if r.labels["arm"] == arm and r.labels["rate"] == rate]


def _gap(records: Sequence[Record], arm: str, rate: float) -> Interval:
    dense = "plain" if arm == "plain" else "nag"
    return paired_interval(_losses(records, arm, rate), _losses(records, dense, 0.0))


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    rows = []
    for arm in ARMS:
        for rate in getattr(settings, arm):
            rows.append(_row(records, arm, rate))
    dense = mean_interval(list(_losses(records, "nag", 0.0).values())).estimate
    claimed = {rate: _gap(records, "nag", rate) for rate in CLAIMED if rate in settings.nag}
    margin = MARGIN * dense
    if claimed and all(gap.high < margin for gap in claimed.values()):
        verdict = "supported"
    elif any(gap.low > margin for gap in claimed.values()):
        verdict = "not supported"
    else:
        verdict = "undecided"
    told = [f"NAG dense {dense:.4f}"]
    told += [f"{rate:.4g} skipped {_signed(gap)}" for rate, gap in claimed.items()]
    told += [f"random {rate:.4g} {_signed(_gap(records, 'random', rate))}" for rate in settings.random]
    text = f"{'; '.join(told)} nats per token against dense (95% intervals over {settings.seeds} seeds)"
    return Summary(text, verdict, rows, {"margin": margin})


def _signed(gap: Interval) -> str:
    return f"+{gap}" if gap.estimate >= 0 else f"{gap}"


def _row(records: Sequence[Record], arm: str, rate: float) -> dict:
    own = [r for r in _of(records, arm, rate) if r.metrics["loss"] is not None]
    mean = lambda name: sum(r.metrics[name] for r in own) / len(own)  # noqa: E731
    return {
        "arm": arm,
        "rate": rate,
        "realised": mean("mod_rate") if rate else 0.0,
        "runs": len(own),
        "steps": own[0].metrics["steps"],
        "train FLOPs": mean("tokens") * mean("train_flops_per_token"),
        "loss": str(mean_interval(list(_losses(records, arm, rate).values()))),
        "minus dense": str(_gap(records, arm, rate)) if rate else "",
        "causal loss": mean("causal_loss") if rate else mean("loss"),
        "step (ms)": 1e3 * mean("step_seconds"),
    }


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    figure, (losses, gaps) = panels(2, "Mixture-of-Depths at equal training FLOPs")
    for arm, color in zip(ARMS, COLORS, strict=False):
        rates = [rate for rate in getattr(settings, arm) if _losses(records, arm, rate)]
        if not rates:
            continue
        line = "-" if len(rates) > 1 else ""
        values = [list(_losses(records, arm, rate).values()) for rate in rates]
        with_spread(losses, rates, values, color=color, label=TITLES[arm], linestyle=line)
        routed = [rate for rate in rates if rate]
        base = _losses(records, "plain" if arm == "plain" else "nag", 0.0)
        own = [_losses(records, arm, rate) for rate in routed]
        with_spread(
            gaps,
            routed,
            [[mine[seed] - base[seed] for seed in mine.keys() & base.keys()] for mine in own],
            color=color,
            linestyle=line,
        ) if routed else None
    gaps.axhline(0, color="#999999", linewidth=1)
    losses.set_ylabel("validation loss under top-k (nats per token)")
    gaps.set_ylabel("minus the dense run of the same seed")
    for ax in (losses, gaps):
        ax.set_xlabel("rate: share of (token, sublayer) pairs skipped")
        ax.xaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    losses.legend(frameon=False)
    return figure


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
