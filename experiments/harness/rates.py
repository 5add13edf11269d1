"""Learning rates: tried on one seed, on a grid that widens until its best rate is inside, then used on fresh seeds."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.jobs import Record, Training
from experiments.harness.sweep import awaited

Losses = Mapping[float, float | None]  # by factor; None if the run diverged


def best(losses: Losses) -> float | None:
    """The factor with the lowest loss; None if all diverged."""
    sound = {factor: loss for factor, loss in losses.items() if loss is not None}
    return min(sound, key=lambda factor: (sound[factor], factor)) if sound else None


def missing(losses: Losses, step: float, widest: float) -> float | None:
    """The factor to try next, beyond the end of the grid at which its best lies. None if the best is inside the grid (a
    rate that diverged counts as a neighbour) or if no further factor is allowed."""
    at = best(losses)
    low, high = min(losses), max(losses)
    wanted = low / step if at in (None, low) else high * step if at == high else None
    return wanted if wanted is not None and 1 / widest <= wanted * 1.0001 and wanted <= widest * 1.0001 else None


def at_edge(losses: Losses) -> bool:
    """Whether the best of several factors is the smallest or the largest tried, or all diverged."""
    return len(losses) > 1 and best(losses) in (None, min(losses), max(losses))


@dataclasses.dataclass(frozen=True)
class Tuning:
    """A job: the trainings at the given factors, then at further ones until the best is inside. Does those that nobody
    has done yet, and waits for those that other processes are doing."""

    name: str
    labels: dict[str, Any]
    trial: Callable[[float], Training]
    factors: tuple[float, ...]
    widest: float

    @property
    def needs(self) -> list[Training]:
        return [self.trial(factor) for factor in self.factors]

    def config(self) -> dict[str, Any]:
        return {"factors": list(self.factors), "widest": self.widest, "at 1": self.trial(1.0).config()}

    def run(self, folder: Path) -> dict[str, Any]:
        """`losses` by factor, and in `widened` the metrics of the factors beyond the first grid."""
        found = {r.labels["factor"]: r.metrics for r in awaited(self.needs, folder.parent)}
        step = max(self.factors[1] / self.factors[0], 1.25) if len(self.factors) > 1 else 2.0
        while (factor := missing(_losses(found), step, self.widest)) is not None:
            (record,) = awaited([self.trial(factor)], folder.parent)
            found[factor] = record.metrics
        further = {f"{f:g}": metrics for f, metrics in found.items() if f not in self.factors}
        return {"losses": [[f, loss] for f, loss in _losses(found).items()], "widened": further}


def _losses(found: Mapping[float, dict]) -> dict[float, float | None]:
    return {factor: metrics["loss"] for factor, metrics in sorted(found.items())}


@dataclasses.dataclass(frozen=True)
class AtBest:
    """A job: a training with a fresh seed at the rate that a tuning has chosen."""

    name: str
    labels: dict[str, Any]
    tuning: Tuning
    at: Callable[[float], Training]  # the training with this job's seed

    @property
    def run_config(self):
        return self.at(1.0).run_config

    @property
    def needs(self) -> list[Tuning]:
        return [self.tuning]

    def config(self) -> dict[str, Any]:
        return self.at(1.0).config() | {"tuned": {"factors": list(self.tuning.factors), "widest": self.tuning.widest}}

    def run(self, folder: Path) -> dict[str, Any]:
        (record,) = awaited(self.needs, folder.parent)
        factor = best({f: loss for f, loss in record.metrics["losses"]})
        if factor is None:
            return {"diverged": "at every rate", "loss": None, "factor": None}
        return self.at(factor).run(folder) | {"factor": factor}


@dataclasses.dataclass(frozen=True)
class Tried:
    """The result of tuning an arm at a shape."""

    losses: dict[float, float | None]

    @classmethod
    def of(cls, records: Sequence[Record]) -> "Tried":
        """Made from the records of the trials (labelled `factor`) and of the tuning."""
        losses = {r.labels["factor"]: r.metrics["loss"] for r in records if "factor" in r.labels}
        for record in records:
            losses |= {factor: loss for factor, loss in record.metrics.get("losses", ())}
        return cls(dict(sorted(losses.items())))

    @property
    def factor(self) -> float | None:
        return best(self.losses)

    @property
    def edge(self) -> bool:
        return at_edge(self.losses)

    @property
    def grid_error(self) -> float | None:
        """How far, in nats, the best of the grid may be above the best possible rate: its distance from the minimum of
        the parabola through it and its neighbours, over the logarithm of the rate. None if a neighbour is missing or
        diverged."""
        tried = list(self.losses)
        at = tried.index(self.factor) if self.factor is not None else 0
        near = tried[max(at - 1, 0) : at + 2]
        losses = [self.losses[factor] for factor in near]
        if len(near) < 3 or None in losses:
            return None
        curve = np.polynomial.Polynomial.fit(np.log(near), losses, 2)
        (lowest,) = curve.deriv().roots()
        return max(float(losses[1] - curve(lowest)), 0.0)  # rounding may give less than 0 if all are equal

    @property
    def loss(self) -> float:
        """The best loss on the seed on which the rates were tried; infinite if all diverged."""
        return math.inf if self.factor is None else float(self.losses[self.factor])
