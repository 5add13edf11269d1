"""A random search, whose best result is then trained on further seeds."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.harness.jobs import Record, Training
from experiments.harness.sweep import awaited

Space = Mapping[str, Sequence[Any]]  # the values of each option, the default first


def drawn(space: Space, trials: int, seed: int) -> list[dict[str, Any]]:
    """The defaults, followed by `trials - 1` distinct uniform draws from the space (fewer if the space has no more)."""
    noise, found = np.random.default_rng(seed), [{name: values[0] for name, values in space.items()}]
    size = int(np.prod([len(values) for values in space.values()]))
    while len(found) < min(trials, size):
        draw = {name: values[int(noise.integers(len(values)))] for name, values in space.items()}
        if draw not in found:
            found.append(draw)
    return found


def best(records: Sequence[Record]) -> Record | None:
    """The trial with the lowest loss among those that did not diverge; None if all did."""
    sound = [record for record in records if record.metrics["loss"] is not None]
    return min(sound, key=lambda record: (record.metrics["loss"], record.name)) if sound else None


@dataclasses.dataclass(frozen=True)
class Confirmation:
    """A job: the best of the trials, trained anew with another seed. Does the trials that nobody has done yet, and
    waits for those that other processes are doing."""

    name: str
    labels: dict[str, Any]
    trials: tuple[Training, ...]
    seeded: tuple[Training, ...]  # each trial with this job's seed

    @property
    def run_config(self):
        return self.seeded[0].run_config

    @property
    def needs(self) -> tuple[Training, ...]:
        return self.trials

    def config(self) -> dict[str, Any]:
        return {trial.name: trial.config() for trial in self.seeded}

    def run(self, folder: Path) -> dict[str, Any]:
        records = awaited(self.needs, folder.parent)
        chosen = best(records)
        if chosen is None:
            return {"diverged": "every trial", "loss": None, "trial": None}
        index = [record.name for record in records].index(chosen.name)
        return self.seeded[index].run(folder) | {"trial": chosen.name}


def options_text(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {json.dumps(value).strip(chr(34))}" for name, value in options.items())
