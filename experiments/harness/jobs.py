"""Jobs: parts of an experiment that can be done on any machine, each once, and leave a record."""

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

import jax

from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.files import write_text
from nagjax.runs.config import RunConfig, TrainConfig, differences, flatten, from_dict, to_dict
from nagjax.runs.log import load_run
from nagjax.runs.metrics import read_metrics
from nagjax.runs.names import CORPUS, METRICS
from nagjax.train.loop import BROKEN_DOWN, train
from pallas_kernels.origin import origin

RECORD = "record.json"
TEXT = "text"  # in a run's metrics: a hash of the corpus that it has read
NAMES = {field.name for field in dataclasses.fields(RunConfig)}
AFTER = "after"  # in a run's config: how it is measured once it is trained
OF = "of"  # in a run's config: the function that measured it; absent before 2026-11-27
RUN = {"scheme", "model", "optimizer", "train", "data"}  # the parts of a run's config that every version has had


class Job(Protocol):
    """One piece of work. `labels` (JSON values) say what it stands for in the analysis. `needs`, if there is one, gives
    the jobs whose records this job reads."""

    name: str  # of its folder; unique in the plan
    labels: dict[str, Any]

    def config(self) -> dict[str, Any]:
        """Everything that decides the outcome, as JSON values."""

    def run(self, folder: Path) -> dict[str, Any]:
        """Does the work in its folder, or continues it; returns metrics as JSON values."""


@dataclasses.dataclass(frozen=True)
class Record:
    """A finished job."""

    name: str
    labels: dict[str, Any]
    config: dict[str, Any]
    metrics: dict[str, Any]
    seconds: float = 0.0
    origin: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Training:
    """A training run; the seed sets its initial values and its data order. `after` measures the run's folder once it is
    trained; it is a dataclass if it has options."""

    name: str
    labels: dict[str, Any]
    run_config: RunConfig
    after: Callable[[Path], dict[str, Any]] | None = None

    def config(self) -> dict[str, Any]:
        if self.after is None:
            return to_dict(self.run_config)
        options = dataclasses.asdict(self.after) if dataclasses.is_dataclass(self.after) else {}
        made = self.after if hasattr(self.after, "__qualname__") else type(self.after)
        return to_dict(self.run_config) | {AFTER: options | {OF: f"{made.__module__}.{made.__qualname__}"}}

    def run(self, folder: Path) -> dict[str, Any]:
        """Scores at the end of training; `diverged`, and no loss, if training broke down."""
        try:
            train(self.run_config, folder, label=self.name)
        except UserError as error:
            if error.field not in BROKEN_DOWN:
                raise
            return {"diverged": str(error), "loss": None}
        return trained_metrics(folder) | (self.after(folder) if self.after else {})


def seeded(config: RunConfig, seed: int) -> RunConfig:
    """The config with this seed for its initial values and its data order."""
    return dataclasses.replace(
        config,
        train=dataclasses.replace(config.train, seed=seed),
        data=dataclasses.replace(config.data, seed=seed),
    )


def looked_at(steps: int, batch: int, eval_batches: int, times: int, tasks: tuple[str, ...] = ()) -> TrainConfig:
    """The training config of a run that is evaluated and saved `times` times, keeping only the newest checkpoint; tasks
    are scored at its end. Bad batches are skipped; a run that diverges shows it by too many of them."""
    often = max(steps // times, 1)
    return TrainConfig(
        steps,
        batch,
        eval_every=often,
        eval_batches=eval_batches,
        save_every=often,
        keep=1,
        on_bad_step="skip",
        tasks=tasks,
        tasks_every=-(-steps // often) * often if tasks else None,
    )


def trained_metrics(folder: Path) -> dict[str, Any]:
    """The metrics of a finished run's folder: scores, costs, use of depth, the validation curve [tokens, loss], and
    scores of tasks, if there are any."""
    run = load_run(folder)
    scored = read_metrics(folder / METRICS)[0]["eval"]
    last = scored[max(scored)]
    facts, scores = run.depth_facts, run.task_scores
    text = json.loads((folder / CORPUS).read_text(encoding="utf-8"))["content"]
    return {name: value for name, value in last.items() if name not in ("kind", "step")} | {
        "steps": run.step,
        "parameters": run.info["parameters"],
        "train_flops_per_token": run.info["train_flops_per_token"],
        "step_seconds": run.step_seconds,
        "growth": facts.growth,
        "late_turn_degrees": facts.late_turn_degrees,
        "dead_sublayers": facts.dead_gates,
        TEXT: text,
        "curve": [[int(t), round(float(v), 5)] for t, v in zip(run.evals.tokens, run.evals.loss, strict=True)],
        **({"tasks": scores} if scores else {}),
    }


def finished(job: Job, folder: Path) -> Record | None:
    """The record in the job's folder, if there is one. Raises UserError if it is another job's."""
    path = folder / job.name / RECORD
    try:
        record = read_record(path)
    except FileNotFoundError:
        return None
    if told := changed(record.config, job):
        raise UserError("out", str(path), f"is of another experiment: {told}; choose another --out")
    return record


def read_record(path: Path) -> Record:
    """The record in a file. Raises OSError, and UserError if the file is damaged."""
    try:
        return Record(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise UserError("out", str(path), f"cannot be read ({error}): delete it, and its job is done again") from None


def changed(config: dict[str, Any], job: Job) -> str:
    """The options in which a record's config differs from the job's, in words; "" if it does not."""
    now, then = _json(job.config()), renewed(config)
    if OF not in config.get(AFTER, {}):
        now.get(AFTER, {}).pop(OF, None)
    told = flatten(then)
    return ", ".join(
        f"{key} was {repr(was) if key in told else 'not recorded'} and is now {today!r}"
        for key, (was, today) in differences(then, now).items()
    )


def renewed(values: Any) -> Any:
    """A job's config from before today's options existed, completed by what was done without them; returned unchanged
    if it cannot be read today."""
    if not isinstance(values, dict):
        return values
    try:
        if values.keys() >= RUN:
            run = {name: values[name] for name in values.keys() & NAMES}
            return {name: renewed(own) for name, own in values.items()} | to_dict(from_dict(RunConfig, run))
        if isinstance(values.get("data"), dict):
            values = values | {"data": to_dict(from_dict(DataConfig, values["data"]))}
    except UserError:
        return values
    return {name: renewed(own) for name, own in values.items()}


def execute(job: Job, folder: Path) -> Record:
    """Runs the job in its own folder inside `folder`, and leaves its record there."""
    own = folder / job.name
    own.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    metrics = job.run(own)
    seconds = round(time.monotonic() - began, 1)
    record = Record(job.name, job.labels, _json(job.config()), _json(metrics), seconds, origin())
    if jax.process_index() == 0:
        write_text(own / RECORD, json.dumps(dataclasses.asdict(record)))
    return record


def _json(values: Any) -> Any:
    """The values as they would be after being written to a JSON file and read back."""
    return json.loads(json.dumps(values))
