"""Measure a run's validation loss and its use of depth, or its scores on tasks."""

import contextlib
from pathlib import Path
from typing import Annotated, Any, Literal

from nagjax.arguments import POSITIONAL, Given
from nagjax.console import note
from nagjax.errors import UserError
from nagjax.files import json_text, read_json, write_text
from nagjax.ranges import Count, Natural


def main(
    run: Annotated[Path, POSITIONAL],
    data: str | None = None,
    batches: Count | None = None,
    as_json: bool = False,
    tasks: tuple[str, ...] | None = None,
    task_folder: Path | None = None,
    fewshot: Natural | None = None,
    limit: Count | None = None,
    weights: Literal["full", "int8"] = "full",
    devices: Count = 1,
    *,
    given: Given,
) -> None:
    """Measure a run's validation loss (with --as-json also telemetry by sublayer) or, with --tasks, its task scores.

    Args:
        run: a run folder, or a model that nagjax import reads.
        data: another corpus with the same tokenizer to measure on; by default the run's own, or stdlib for an imported
            model.
        batches: number of batches to read; by default all.
        as_json: print one JSON object; null stands for a number that is not finite or not defined.
        tasks: files of questions (.jsonl) and tasks of lm-evaluation-harness, separated by spaces or commas; a run's
            scores are also written to its tasks.json, so the run must not be training.
        task_folder: folder with your own tasks for lm-evaluation-harness.
        fewshot: number of examples in each prompt of lm-evaluation-harness; by default the task's own.
        limit: number of questions to ask of each task; by default all.
        weights: int8: matrices are stored in 8 bits, with a scale per output channel.
        devices: split parameters and batches over this many of this machine's devices; the number must divide the run's
            batch, which is 1 for an imported model.
    """
    if tasks is None:
        given.refuse(("task_folder", "fewshot", "limit"), "is for questions: give --tasks, too, or leave it out")
    else:
        given.refuse(("data", "batches"), "is for the loss of a text: leave it out, or --tasks")
    note(f"evaluating {run}")
    if tasks is not None:
        scores = _on_tasks(run, tasks, task_folder, fewshot, limit, weights, devices)
        if as_json:
            print(json_text(scores))
            return
        for task, metrics in scores.items():
            for metric, value in metrics.items():
                print(f"{task:24} {metric:24} {value:.6g}")
        return
    from nagjax.generate.evaluate import evaluate
    from nagjax.interop.load import load
    from nagjax.train.distributed.mesh import local_devices

    opened = load(run, devices=local_devices(devices))
    scores = evaluate(opened, data=data, batches=batches, weights=weights)
    if as_json:
        print(json_text(scores))
        return
    numbers = {name: value for name, value in scores.items() if isinstance(value, int | float)}
    width, own = max(map(len, numbers)), opened.config.data
    print(f"{'text':{width}}  {data or ' '.join(own.mix) or own.path}, held out")
    for name, value in numbers.items():
        print(f"{name:{width}}  {value:.6g}" if isinstance(value, float) else f"{name:{width}}  {value}")


def _on_tasks(
    run: Path,
    tasks: tuple[str, ...],
    folder: Path | None,
    fewshot: int | None,
    limit: int | None,
    weights: Literal["full", "int8"],
    devices: int,
) -> dict[str, dict[str, float]]:
    """Metrics of each task by name. Files need no harness; all that was found is written to the folder of a run, and
    not to that of another model."""
    from nagjax.generate.weights import with_weights
    from nagjax.interop.load import load
    from nagjax.runs.lock import WriterLock
    from nagjax.runs.names import CHECKPOINTS, TASKS
    from nagjax.train.distributed.mesh import local_devices
    from nagjax.train.tasks import FILE, open_tasks, task_names

    names = task_names(tasks)
    if not names:
        raise UserError("tasks", tasks, "give a file of questions (.jsonl), or a task of lm-evaluation-harness")
    files = [name for name in names if name.endswith(FILE)]
    others = [name for name in names if name not in files]
    if others:
        from nagjax.interop.lm_eval import evaluate_tasks
    elif folder is not None or fewshot is not None:
        name, value = ("fewshot", fewshot) if folder is None else ("task_folder", str(folder))
        raise UserError(name, value, "is for tasks of lm-evaluation-harness: leave it out for files of questions")
    opened = with_weights(load(run, devices=local_devices(devices)), weights)
    asked = open_tasks(files, opened.tokenizer, opened.config.model.context, limit)
    own = (run / CHECKPOINTS).is_dir()
    with WriterLock(run, "eval", "run") if own else contextlib.nullcontext():
        found = {"results": {task.name: {} for task in asked.tasks}}
        for name, value in asked.score(opened).items():
            task, _, metric = name.rpartition("/")
            found["results"][task][metric] = value
        if others:
            report = evaluate_tasks(opened, others, task_folder=folder, fewshot=fewshot, limit=limit)
            found = report | {"results": found["results"] | report["results"]}
        record = {"step": opened.step, "tasks": names, "limit": limit, "weights": weights, **found}
        if own:
            write_text(run / TASKS, json_text(_beside(run / TASKS, record), indent=2, default=str))
    return {
        task: {metric: value for metric, value in own.items() if isinstance(value, float)}
        for task, own in found["results"].items()
    }


def _beside(path: Path, record: dict[str, Any]) -> dict[str, Any]:
    """The record, beside the other tasks' scores in the file if these are of the same weights and as many questions."""
    try:
        before = read_json(path)
    except (OSError, ValueError, UserError):  # none yet, or a damaged file
        return record
    if not isinstance(before, dict) or any(before.get(name) != record[name] for name in ("step", "limit", "weights")):
        note(f"{path} held scores of other weights or of another number of questions: they are replaced")
        return record
    kept = {name: before.get(name, {}) | own for name, own in record.items() if isinstance(own, dict)}
    return before | record | kept | {"tasks": [*dict.fromkeys([*before["tasks"], *record["tasks"]])]}
