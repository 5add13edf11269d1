"""A comparison in which time counts: the step times of the arms are measured side by side."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from matplotlib.figure import Figure

from experiments.harness.budget_curves import figure_of_budgets
from experiments.harness.comparison import Comparison
from experiments.harness.jobs import Job, Record
from experiments.harness.matching import step_seconds
from experiments.harness.results import Summary
from experiments.harness.settings import Settings
from nagjax.runs.config import RunConfig, to_dict


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """A job: training steps of all arms, timed in turn. Times that runs measure while they train depend on what else
    ran then."""

    name: ClassVar[str] = "step-times"
    labels: ClassVar[dict[str, Any]] = {"step times": True}
    configs: Mapping[str, RunConfig]
    rounds: int = 9
    steps: int = 2  # in a row

    def config(self) -> dict[str, Any]:
        return {arm: to_dict(config) for arm, config in self.configs.items()}

    def run(self, folder: Path) -> dict[str, Any]:
        """`step_seconds` by arm: medians over the rounds."""
        times = step_seconds(self.configs, self.rounds, self.steps)
        return {"step_seconds": {arm: round(statistics.median(own), 5) for arm, own in times.items()}}


@dataclasses.dataclass(frozen=True)
class TimedComparison(Comparison):
    """A comparison with a column of step times at the last shape, as ratios to the reference's, and a figure of the
    losses that the arms in `shown` reach against their FLOPs and their time."""

    shown: tuple[str, ...] = ()

    def plan(self, settings: Settings) -> list[Job]:
        configs = {arm: self.config(settings, arm, settings.shapes[-1]) for arm in self.chosen(settings)}
        return [*super().plan(settings), StepTimes(configs)]

    def summarise(self, settings: Settings, records: Sequence[Record]) -> Summary:
        trained, seconds = _parted(records)
        summary = super().summarise(settings, trained)
        first, last = self.claim.reference, settings.shapes[-1].name
        for row in summary.table:
            known = row["shape"] == last and first in seconds
            row[f"step time / {first}'s"] = f"{seconds[row['arm']] / seconds[first]:.2f}" if known else ""
        return summary

    def draw(self, settings: Settings, records: Sequence[Record]) -> Figure:
        trained, seconds = _parted(records)
        shown = {arm: seconds[arm] for arm in self.shown if arm in seconds}
        return figure_of_budgets(self.outcome(settings, trained), shown, self.title)


def _parted(records: Sequence[Record]) -> tuple[list[Record], dict[str, float]]:
    """The records of trainings, and the seconds per step by arm."""
    (times,) = (record for record in records if "step times" in record.labels)
    return [record for record in records if record is not times], times.metrics["step_seconds"]
