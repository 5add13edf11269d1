"""The results of a comparison's records: losses by arm, shape and fresh seed, and how the rates were chosen."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from experiments.harness.jobs import Record
from experiments.harness.rates import Tried
from experiments.harness.settings import Settings, Shape
from experiments.harness.statistics import Interval, mean_interval
from experiments.harness.verdicts import Gap


@dataclasses.dataclass(frozen=True)
class Outcome:
    """The results of the arms of a size at its shapes."""

    settings: Settings
    arms: tuple[str, ...]
    records: Sequence[Record]

    @property
    def shapes(self) -> tuple[Shape, ...]:
        return self.settings.shapes

    @functools.cached_property
    def _by_pair(self) -> dict[tuple[str, str], list[Record]]:
        found: dict[tuple[str, str], list[Record]] = {}
        for record in self.records:
            found.setdefault((record.labels["arm"], record.labels["shape"]), []).append(record)
        return found

    def tried(self, arm: str, shape: Shape) -> Tried:
        own = self._by_pair.get((arm, shape.name), [])
        return Tried.of([record for record in own if "factor" in record.labels or "losses" in record.metrics])

    def runs(self, arm: str, shape: Shape) -> dict[int, dict[str, Any]]:
        """The metrics of an arm at a shape, by fresh seed."""
        own = self._by_pair.get((arm, shape.name), [])
        return {r.labels["seed"]: r.metrics for r in own if "factor" not in r.labels and "loss" in r.metrics}

    def sound(self, arm: str, shape: Shape) -> list[dict[str, Any]]:
        """The metrics of the fresh runs that did not diverge; without fresh seeds, those of the best run tried."""
        if runs := self.runs(arm, shape):
            return [run for run in runs.values() if run["loss"] is not None]
        factor, own = self.tried(arm, shape).factor, self._by_pair.get((arm, shape.name), [])
        if factor is None:
            return []
        widened = [r.metrics["widened"][at] for r in own if (at := f"{factor:g}") in r.metrics.get("widened", ())]
        return [r.metrics for r in own if r.labels.get("factor") == factor] or widened

    def losses(self, arm: str, shape: Shape) -> dict[int, float | None]:
        return {seed: run["loss"] for seed, run in self.runs(arm, shape).items()}

    def diverged(self, arm: str, shape: Shape) -> int:
        """The number of fresh runs that diverged."""
        return sum(loss is None for loss in self.losses(arm, shape).values())

    def loss(self, arm: str, shape: Shape) -> Interval:
        """The mean loss in nats per token over the fresh seeds that did not diverge, with its interval; infinite if all
        did."""
        losses = [run["loss"] for run in self.sound(arm, shape)]
        return mean_interval(losses) if losses else Interval(math.inf, math.inf, math.inf)

    def gap(self, rival: str, judged: str, shape: Shape) -> Gap:
        """The rival's loss minus the judged arm's."""
        return self._gap(f"{rival} at {shape.name}", (rival, shape), (judged, shape))

    def gain(self, arm: str, shape: Shape, other: Shape) -> Gap:
        """An arm's loss at a shape minus its loss at another."""
        return self._gap(f"{arm} at {other.name}", (arm, shape), (arm, other))

    def _gap(self, name: str, rival: tuple[str, Shape], judged: tuple[str, Shape]) -> Gap:
        tried = [self.tried(*pair).loss for pair in (rival, judged)]
        gap = Gap.of(name, self.losses(*rival), self.losses(*judged))
        return dataclasses.replace(gap, hint=tried[0] - tried[1] if all(map(math.isfinite, tried)) else math.nan)

    def gap_text(self, gap: Gap) -> str:
        if gap.values:
            return str(gap)
        return f"{gap.hint:+.3f} (tuning seed)" if math.isfinite(gap.hint) else "diverged"

    def mean(self, arm: str, shape: Shape, name: str) -> float:
        values = [run[name] for run in self.sound(arm, shape) if name in run]
        return float(np.mean(values)) if values else math.nan

    @property
    def scores(self) -> list[str]:
        """The names of the task scores, `TASK/METRIC`."""
        return sorted({name for record in self.records for name in record.metrics.get("tasks", ())})

    def answered(self, score: str, arm: str, shape: Shape) -> str:
        """A task's score, as the mean over the runs that have it."""
        found = [run.get("tasks", {}).get(score) for run in self.sound(arm, shape)]
        values = [value for value in found if value is not None]
        return mean_interval(values).text(3) if values else ""

    def order(self, shape: Shape) -> list[str]:
        """The arms by ascending mean loss; arms with a divergence come after those without."""
        return sorted(self.arms, key=lambda arm: (self.diverged(arm, shape), self.loss(arm, shape).estimate))

    def ranking(self) -> str:
        """The order of all arms at every shape."""

        def told(arm: str, shape: Shape) -> str:
            loss, lost = self.loss(arm, shape), self.diverged(arm, shape)
            shown = f"{loss.estimate:.3f}" if math.isfinite(loss.estimate) else "diverged"
            return f"{arm} {shown}{f' ({lost} diverged)' if lost and math.isfinite(loss.estimate) else ''}"

        return "; ".join(f"{s.name}: {', '.join(told(arm, s) for arm in self.order(s))}" for s in self.shapes)

    @property
    def astray(self) -> list[str]:
        """The arms and shapes with a fresh run whose rate is not the one that these trials chose, so that the records
        belong to two experiments."""
        found = []
        for shape in self.shapes:
            for arm in self.arms:
                chosen = self.tried(arm, shape).factor
                own = {run.get("factor") for run in self.runs(arm, shape).values()} - {None, chosen}
                if own and chosen is not None:
                    at = ", ".join(f"{factor:g}" for factor in sorted(own))
                    found.append(
                        f"{arm} {shape.name} has runs at {at} times its rate, where its trials chose {chosen:g}"
                    )
        return found

    @property
    def edges(self) -> list[str]:
        """The arms and shapes whose tuning is not finished."""
        return [f"{arm} {s.name}" for s in self.shapes for arm in self.arms if self.tried(arm, s).edge]
