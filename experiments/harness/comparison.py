"""Comparisons of trained models: arms x shapes x seeds, and everything that follows from them.

    arms      what is compared: a scheme, and what else the arm changes
    claim     how differences decide (harness/claims.py), by the rules of harness/verdicts.py
    measures  further quantities read from the trained runs, for tables and figures

Rates are tried on seed 0 for every arm and shape, on a grid that widens until its best is inside (harness/rates.py);
the runs that are compared have fresh seeds at that rate. Jobs are folders with records, so a plan can resume, and
processes and machines can share it.
"""

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
from matplotlib.figure import Figure

from experiments.harness.claims import Claim
from experiments.harness.comparison_figure import figure_of
from experiments.harness.jobs import Job, Record, Training, looked_at, seeded
from experiments.harness.matching import train_flops, with_flops
from experiments.harness.outcome import Outcome
from experiments.harness.rates import AtBest, Tuning
from experiments.harness.results import Summary
from experiments.harness.settings import Settings, Shape, brief
from experiments.harness.speed import speed_up
from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme, find_scheme
from nagjax.runs.config import OptimizerConfig, RunConfig


@dataclasses.dataclass(frozen=True)
class Arm:
    """A scheme with options, and the changes that the arm makes to the model's and the optimizer's config."""

    scheme: str
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def made(self) -> Scheme:
        """The scheme. Raises UserError if it is unknown."""
        return find_scheme(self.scheme)(**self.options)


def schemes(*names: str) -> dict[str, Arm]:
    """An arm for each scheme with its default options."""
    return {name: Arm(name) for name in names}


@dataclasses.dataclass(frozen=True)
class Measure:
    """A quantity read from a run's metrics: a number, or a profile over depth."""

    label: str
    read: Callable[[dict[str, Any]], float | Sequence[float]]
    log: bool = False
    profile: bool = False
    along: Literal["blocks", "sublayers"] = "blocks"  # the axis of a profile


COMMON = {
    "growth": Measure("growth", lambda run: run["growth"]),
    "late turn": Measure("late turn", lambda run: run["late_turn_degrees"]),
    "small updates": Measure("sublayers with updates below 5%", lambda run: run["dead_sublayers"]),
}


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A recipe that compares arms (see the module's docstring). `model` and `optimizer` change the configs of all arms;
    `after` measures a trained run's folder.

    Raises UserError if the claim names an arm that is not there.
    """

    arms: Mapping[str, Arm]
    claim: Claim
    title: str
    measures: Mapping[str, Measure] = dataclasses.field(default_factory=lambda: COMMON)
    model: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    optimizer: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    after: Callable[[Path], dict[str, Any]] | None = None
    match: Literal["tokens", "flops"] | None = None  # in what the claim says that the arms are equal, if it does

    def __post_init__(self):
        if unknown := set(self.claim.named) - set(self.arms):
            raise UserError("claim", sorted(unknown), f"it names arms that are none; there are {', '.join(self.arms)}")

    def chosen(self, settings: Settings) -> tuple[str, ...]:
        """The arms of a size. Raises UserError for an arm that the recipe does not have."""
        if unknown := set(settings.arms) - set(self.arms):
            raise UserError("arms", sorted(unknown), f"there are {', '.join(self.arms)}")
        return settings.arms or tuple(self.arms)

    def plan(self, settings: Settings) -> list[Job]:
        """The jobs in this order: all first grids, then their widening, then, seed by seed, all arms at their best
        rates."""
        pairs = [(arm, shape) for shape in settings.shapes for arm in self.chosen(settings)]
        seeds = range(settings.first_seed, settings.first_seed + settings.seeds)
        if len(settings.factors) == 1:
            at = settings.factors[0]
            return [self._training(settings, *pair, at, seed, tried=False) for seed in seeds for pair in pairs]
        tunings = {pair: self._tuning(settings, *pair) for pair in pairs}
        trials = [one.trial(factor) for one in tunings.values() for factor in settings.factors]
        return [*trials, *tunings.values(), *(self._fresh(settings, *p, tunings[p], s) for s in seeds for p in pairs)]

    def _tuning(self, settings: Settings, arm: str, shape: Shape) -> Tuning:
        trial = functools.partial(self._trial, settings, arm, shape)
        labels = {"arm": arm, "shape": shape.name}
        return Tuning(f"{arm}-{shape.name}-rate", labels, trial, settings.factors, settings.widest)

    def _trial(self, settings: Settings, arm: str, shape: Shape, factor: float) -> Training:
        return self._training(settings, arm, shape, factor, 0, tried=True)

    def _fresh(self, settings: Settings, arm: str, shape: Shape, tuning: Tuning, seed: int) -> AtBest:
        def at(factor: float) -> Training:
            return self._training(settings, arm, shape, factor, seed, tried=False)

        return AtBest(at(1.0).name, at(1.0).labels, tuning, at)

    def _training(
        self, settings: Settings, arm: str, shape: Shape, factor: float, seed: int, *, tried: bool
    ) -> Training:
        config = seeded(self.config(settings, arm, shape, factor), seed)
        labels = {"arm": arm, "shape": shape.name, "seed": seed} | ({"factor": factor} if tried else {})
        name = f"{arm}-{shape.name}-{f'x{factor:g}-' if tried else ''}s{seed}"
        return Training(name, labels, config, None if tried else self.after)

    def config(self, settings: Settings, arm: str, shape: Shape, factor: float = 1.0) -> RunConfig:
        """The config of an arm at a shape; `factor` multiplies its middle learning rate."""
        own, scheme = self.arms[arm], self.arms[arm].made()
        sizes = {name: getattr(shape, name) for name in ("depth", "width", "context", "hidden", "heads", "remat")}
        rate = factor * (shape.lr or scheme.default_rate(shape.width, shape.depth))
        config = RunConfig(
            scheme,
            ModelConfig(**sizes | self.model | own.model),
            OptimizerConfig(**{"lr": rate} | self.optimizer | own.optimizer),
            looked_at(shape.steps, shape.batch, settings.eval_batches, settings.looks, settings.tasks),
            DataConfig(path=settings.data),
        )
        first = self.chosen(settings)[0]
        if settings.match == "tokens" or arm == first:
            return config
        return with_flops(config, train_flops(self.config(settings, first, shape)))

    def outcome(self, settings: Settings, records: Sequence[Record]) -> Outcome:
        return Outcome(settings, self.chosen(settings), records)

    def summarise(self, settings: Settings, records: Sequence[Record]) -> Summary:
        outcome = self.outcome(settings, records)
        decision = self.claim.decide(outcome)
        rows = [self._row(outcome, arm, shape) for shape in outcome.shapes for arm in outcome.order(shape)]
        details = {"at_the_grid_edge": outcome.edges} | self.profiles(outcome)
        reasons = [f"without {arm}" for arm in self.claim.about(tuple(self.arms)) if arm not in outcome.arms]
        reasons += outcome.astray
        reasons += [f"compared at equal {settings.match}"] if self.match not in (None, settings.match) else []
        verdict = "undecided" if reasons else decision.verdict
        return Summary(decision.told, verdict, rows, details, decision.headline, reasons)

    def _row(self, outcome: Outcome, arm: str, shape: Shape) -> dict[str, Any]:
        reference, tried, sound = self.claim.reference, outcome.tried(arm, shape), outcome.sound(arm, shape)
        lost, loss = outcome.diverged(arm, shape), outcome.loss(arm, shape)
        compared = arm != reference and reference in outcome.arms
        tokens, parameters = (outcome.mean(arm, shape, name) for name in ("tokens", "parameters"))
        return {
            "shape": shape.name,
            "arm": arm,
            "lr x": _number(tried.factor) + (" (edge)" if tried.edge else ""),
            "grid error": "" if tried.grid_error is None else f"{tried.grid_error:.4f}",
            "loss": str(loss) if sound else "diverged",
            "diverged": f"{lost} of {len(outcome.losses(arm, shape))}" if lost else "",
            f"minus {reference}": outcome.gap_text(outcome.gap(arm, reference, shape)) if compared else "",
            "tokens": brief(tokens) if sound else "",
            "per parameter": f"{tokens / parameters:.2g}" if sound else "",
            "FLOPs": _ratio(outcome, arm, reference, shape) if compared else "",
            "speed-up": self._speed_up(outcome, arm, reference, shape) if compared else "",
            **self._numbers(sound),
            **{name: outcome.answered(name, arm, shape) for name in outcome.scores},
        }

    def _speed_up(self, outcome: Outcome, arm: str, reference: str, shape: Shape) -> str:
        """The mean over the seeds on which neither run diverged."""
        pairs = list(zip(outcome.sound(arm, shape), outcome.sound(reference, shape), strict=False))
        if not pairs or outcome.diverged(arm, shape) or outcome.diverged(reference, shape):
            return ""
        return f"{np.mean([speed_up(own['curve'], other['curve']) for own, other in pairs if 'curve' in own]):.2f}"

    def _numbers(self, runs: Sequence[dict[str, Any]]) -> dict[str, str]:
        """Means over runs of the measures that are numbers."""
        found = {name: _values(measure, runs) for name, measure in self.measures.items() if not measure.profile}
        return {name: f"{np.mean(values):.4g}" if values else "" for name, values in found.items()}

    def profiles(self, outcome: Outcome) -> dict[str, Any]:
        """Means over seeds of the measures that are profiles over depth, by measure, then by shape and arm."""
        found: dict[str, Any] = {}
        for name, measure in self.measures.items():
            for shape in outcome.shapes if measure.profile else ():
                for arm in outcome.arms:
                    if values := _values(measure, outcome.sound(arm, shape)):
                        mean = [round(float(v), 5) for v in np.mean(values, axis=0)]
                        found.setdefault(name, {})[f"{shape.name}-{arm}"] = mean
        return found

    def draw(self, settings: Settings, records: Sequence[Record]) -> Figure:
        return figure_of(self, self.outcome(settings, records))


def _ratio(outcome: Outcome, arm: str, reference: str, shape: Shape) -> str:
    """Training FLOPs divided by the reference's."""
    own, other = (
        outcome.mean(name, shape, "tokens") * outcome.mean(name, shape, "train_flops_per_token")
        for name in (arm, reference)
    )
    return f"{own / other:.3f}" if math.isfinite(own / other) else ""


def _values(measure: Measure, runs: Sequence[dict[str, Any]]) -> list:
    """The values of the runs that have this measure."""
    found = []
    for run in runs:
        with contextlib.suppress(KeyError):
            found.append(measure.read(run))
    return found


def _number(factor: float | None) -> str:
    return "" if factor is None or not math.isfinite(factor) else f"{factor:g}"
