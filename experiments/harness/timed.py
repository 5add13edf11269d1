"""Training for as long as another run takes."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.harness.jobs import Training
from experiments.harness.matching import ratio, step_seconds, with_steps
from experiments.harness.ngram import floor_of
from nagjax.files import write_text
from nagjax.runs.config import RunConfig, to_dict

MEASURED = "step_times.json"


@dataclasses.dataclass(frozen=True)
class TimeMatched:
    """A job: `run_config`, trained for as many steps as fit into the time that `like` takes. The steps of both are
    timed in turn, once, where the job runs, and the times are kept in its folder. Its metrics include the n-gram losses
    of the text that it read. `after` is as in `Training`."""

    name: str
    labels: dict[str, Any]
    run_config: RunConfig
    like: RunConfig
    after: Callable[[Path], dict[str, Any]] | None = None

    def config(self) -> dict[str, Any]:
        """The number of steps follows from a measurement, so `train.steps` here is that of the other run."""
        own = Training(self.name, self.labels, with_steps(self.run_config, self.like.train.steps), self.after)
        return own.config() | {"time_of": to_dict(self.like)}

    def run(self, folder: Path) -> dict[str, Any]:
        path = folder / MEASURED
        if not path.exists():
            write_text(path, json.dumps(step_seconds({"own": self.run_config, "other": self.like})))
        seconds = json.loads(path.read_text(encoding="utf-8"))
        steps = round(self.like.train.steps * ratio(seconds["other"], seconds["own"]))
        config = with_steps(self.run_config, steps)
        found = Training(self.name, self.labels, config, self.after).run(folder)
        return found | {"step_times": seconds} | {"ngram": floor_of(config).run(folder)["ngram"]}
