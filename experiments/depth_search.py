"""Can NAG be made to win at depth? A random search over its options, and one of the same budget over plain's.

Claim: At 64 blocks NAG, tuned, is ahead of plain pre-norm tuned as hard.
Source: Figliolia & Millidge 2026, arXiv:2606.16112
Expected: NAG ahead (no figures published); an independent dense re-implementation at equal FLOPs found it slightly
  behind, bits per byte of plain / NAG 0.7503 / 0.7589 at 64 blocks
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: a TPU slice or 8 GPUs, one task per run
Time: smoke 10 s; cpu about 25 min with --processes 2; h200 and paper not measured
Command: python -m experiments.depth_search --processes 2

Every scheme gets the same number of trials, all with seed 0: its defaults, then draws from its space. The trial of
lowest validation loss is trained again with seeds that no trial had. Those runs are compared, paired by seed, at equal
width, tokens and depth. Both may change the learning rate, the optimizer and weight decay (for NAG that of scale-free
matrices). NAG may also change the exponent p of its step sizes, the gates' learning rate, the ramp of the step sizes
and the gain with which its head starts; plain may also change its scaled start. Plain's space is the smaller one, so
the same budget searches it more closely. ReZero, which has nothing more to choose (30 trials are all there are), is
beside them because it has a lower loss than both in `depth_scaling`, size baselines, on one seed; the claim is not
about it.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from matplotlib.figure import Figure

from experiments.harness.figures import look, panels
from experiments.harness.jobs import Job, Record, Training, looked_at, seeded
from experiments.harness.results import Summary
from experiments.harness.searching import Confirmation, Space, best, drawn, options_text
from experiments.harness.statistics import mean_interval
from experiments.harness.verdicts import UNTUNED, Gap, ahead_of_all
from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.model.config import ModelConfig
from nagjax.ranges import Count, Natural, Positive
from nagjax.residual import Scheme, register
from nagjax.residual.schemes.nag import NAG
from nagjax.residual.schemes.plain import Plain
from nagjax.residual.schemes.rezero import ReZero
from nagjax.runs.config import OptimizerConfig, RunConfig


@register
@dataclasses.dataclass(frozen=True)
class SearchedNAG(NAG):
    """NAG with two more of its choices as options."""

    name: ClassVar[str] = "nag_searched"
    title: ClassVar[str] = "NAG (searched)"

    gate_rate: Positive = NAG.gate_rate  # learning rate of the gates, relative to the matrices'
    head_gain: Positive = 1.0  # factor on the gain the head starts with

    def ends(self, width, embedding_std, rngs):
        made = super().ends(width, embedding_std, rngs)
        made.decode[...] = made.decode[...] + math.log(self.head_gain)
        return made


COMMON: Space = {
    "rate": (1.0, 0.25, 0.5, 2.0, 4.0),  # times the scheme's default
    "optimizer": ("adamw", "muon"),
    "weight_decay": (0.1, 0.0, 0.3),
}
SPACES: dict[str, tuple[type[Scheme], Space]] = {
    "plain": (Plain, {"scaled_start": (True, False)}),
    "nag": (
        SearchedNAG,
        {
            "alpha_power": (0.5, 0.25, 0.75, 1.0),
            "gate_rate": (NAG.gate_rate, 1 / 48, 1 / 3, 1.0),
            "ramp": (0.05, 0.0, 0.2),
            "head_gain": (1.0, 0.5, 2.0, 4.0),
        },
    ),
    "rezero": (ReZero, {}),
}
PLAIN, JUDGED = "plain", "nag"


@dataclasses.dataclass(frozen=True)
class Settings:
    depth: Count
    width: Count
    context: Count
    batch: Count
    steps: Count
    trials: Count  # of each scheme
    seeds: Natural  # of the confirmation
    schemes: tuple[str, ...] = tuple(SPACES)
    eval_batches: Count = 24
    data: str = "stdlib"  # or a folder made by nagjax data prepare


SIZES = {
    "smoke": Settings(2, 16, 16, 8, 4, 1, 1, (JUDGED,), eval_batches=1),
    "cpu": Settings(64, 32, 64, 8, 100, 12, 3, eval_batches=10),
    "h200": Settings(64, 256, 512, 16, 512, 10, 5),
    "paper": Settings(64, 512, 1024, 64, 4096, 36, 5),
}


def plan(settings: Settings) -> list[Job]:
    if unknown := set(settings.schemes) - set(SPACES):
        raise UserError("schemes", sorted(unknown), f"there are spaces for {', '.join(SPACES)}")
    searched = {scheme: _trials(settings, scheme) for scheme in settings.schemes}
    confirmed = [
        Confirmation(
            f"{scheme}-best-s{seed}",
            {"scheme": scheme, "part": "confirmation", "seed": seed},
            tuple(trials),
            tuple(dataclasses.replace(trial, run_config=seeded(trial.run_config, seed)) for trial in trials),
        )
        for seed in range(1, settings.seeds + 1)
        for scheme, trials in searched.items()
    ]
    turns = itertools.zip_longest(*searched.values())  # a space may have fewer trials to draw
    return [trial for turn in turns for trial in turn if trial] + confirmed


def _trials(settings: Settings, scheme: str) -> list[Training]:
    return [
        Training(
            f"{scheme}-{i}",
            {"scheme": scheme, "part": "trial", "options": options},
            seeded(_config(settings, scheme, options), 0),
        )
        for i, options in enumerate(drawn(COMMON | SPACES[scheme][1], settings.trials, seed=0))
    ]


def _config(settings: Settings, scheme: str, options: dict[str, Any]) -> RunConfig:
    kind, own = SPACES[scheme]
    chosen = kind(**{name: options[name] for name in own})
    model = ModelConfig(depth=settings.depth, width=settings.width, context=settings.context)
    rate = options["rate"] * chosen.default_rate(settings.width, settings.depth)
    optimizer = OptimizerConfig(options["optimizer"], lr=rate, weight_decay=options["weight_decay"])
    train = looked_at(settings.steps, settings.batch, settings.eval_batches, times=2)
    return RunConfig(chosen, model, optimizer, train, DataConfig(path=settings.data))


def _part(records: Sequence[Record], scheme: str, part: str) -> list[Record]:
    return [r for r in records if (r.labels["scheme"], r.labels["part"]) == (scheme, part)]


def _losses(records: Sequence[Record], scheme: str) -> dict[int, float | None]:
    """By fresh seed; None: diverged."""
    return {r.labels["seed"]: r.metrics["loss"] for r in _part(records, scheme, "confirmation")}


def _confirmed(records: Sequence[Record], scheme: str) -> dict[int, float]:
    """By fresh seed, without what diverged."""
    return {seed: loss for seed, loss in _losses(records, scheme).items() if loss is not None}


def _edges(settings: Settings, records: Sequence[Record]) -> list[str]:
    """Schemes whose best trial has the smallest or the largest rate there was to draw."""
    found = {scheme: best(_part(records, scheme, "trial")) for scheme in settings.schemes}
    ends = min(COMMON["rate"]), max(COMMON["rate"])
    return [scheme for scheme, trial in found.items() if trial and trial.labels["options"]["rate"] in ends]


def _astray(records: Sequence[Record], scheme: str) -> bool:
    """Whether a run with a fresh seed is not of the trial that is the best of these."""
    found = best(_part(records, scheme, "trial"))
    confirmed = {record.metrics.get("trial") for record in _part(records, scheme, "confirmation")} - {None}
    return found is not None and not confirmed <= {found.name}


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    fresh = {scheme: _confirmed(records, scheme) for scheme in settings.schemes}
    table, told = [], []
    for scheme, own in fresh.items():
        trials = _part(records, scheme, "trial")
        for record in sorted(trials, key=lambda r: math.inf if r.metrics["loss"] is None else r.metrics["loss"]):
            loss = "diverged" if record.metrics["loss"] is None else record.metrics["loss"]
            table.append({"scheme": scheme, "options": options_text(record.labels["options"]), "loss": loss})
        found = best(trials)
        if found and own:
            lost = len(_part(records, scheme, "confirmation")) - len(own)
            told.append(
                f"{scheme} {mean_interval(list(own.values()))}{f' ({lost} diverged)' if lost else ''} "
                f"with {options_text(found.labels['options'])} "
                f"(defaults {trials[0].metrics['loss'] or math.nan:.4f}, best trial {found.metrics['loss']:.4f})"
            )
    nag = fresh.pop(JUDGED, {})
    gaps = {s: Gap.of(s, _losses(records, s), _losses(records, JUDGED)) for s in fresh if nag}
    told += [f"{scheme} minus NAG {gap}" for scheme, gap in gaps.items() if gap.values]
    head = f"{settings.depth} blocks, best of {settings.trials} trials each, {settings.seeds} fresh seeds: "
    plain = gaps.get(PLAIN)
    found = f"plain minus NAG: {plain} nats" if plain else ""
    details = {"at_the_grid_edge": _edges(settings, records)}
    reasons = [UNTUNED] if settings.trials < 2 else []
    reasons += [
        f"{scheme} has runs of another trial than its best" for scheme in settings.schemes if _astray(records, scheme)
    ]
    verdict = "undecided" if reasons else ahead_of_all([plain] if plain else [])
    return Summary(head + "; ".join(told), verdict, table, details, found, reasons)


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    figure, (found,) = panels(1, f"{settings.depth} blocks: trials in order of loss, and the best with fresh seeds")
    for scheme in settings.schemes:
        losses = np.sort([r.metrics["loss"] for r in _part(records, scheme, "trial") if r.metrics["loss"] is not None])
        found.plot(np.arange(1, len(losses) + 1), losses, **look(scheme), label=scheme)
        confirmed, sound = _losses(records, scheme), list(_confirmed(records, scheme).values())
        found.scatter([0] * len(sound), sound, s=14, color=look(scheme)["color"], alpha=0.6)
        trials = len(_part(records, scheme, "trial"))
        found.set_xlim(-0.5, max(trials + 0.5, found.get_xlim()[1]))
        for at in [0] * (len(confirmed) > len(sound)) + list(range(len(losses) + 1, trials + 1)):
            found.text(at, 0.97, "x", color=look(scheme)["color"], transform=found.get_xaxis_transform(), ha="center")
    found.set_xlabel("trial (0: the best one, fresh seeds); x: diverged")
    found.set_ylabel("validation loss (nats per token)")
    found.legend(frameon=False)
    return figure


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
