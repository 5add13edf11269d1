"""Validation loss and depth of a run."""

import json
from pathlib import Path
from typing import Annotated

from nagjax.arguments import POSITIONAL
from nagjax.console import note
from nagjax.ranges import Count, Natural


def main(
    run: Annotated[Path, POSITIONAL],
    data: str | None = None,
    batches: Count | None = None,
    as_json: bool = False,
    tasks: str | None = None,
    task_folder: Path | None = None,
    fewshot: Natural | None = None,
    limit: Count | None = None,
) -> None:
    """Validation loss of a run, and what its depth does; or, with --tasks, benchmarks of lm-evaluation-harness.

    Args:
        run: a run folder.
        data: another corpus with the same tokenizer; the run's own by default.
        batches: read only so many batches; all by default.
        as_json: print one JSON object.
        tasks: of the harness, separated by commas; the report goes to tasks.json in the run's folder.
        task_folder: with tasks of your own.
        fewshot: examples in each prompt; the task's own number by default.
        limit: ask only so many questions of each task.
    """
    note(f"evaluating {run}")
    if tasks is not None:
        _benchmarks(run, tasks, task_folder, fewshot, limit, as_json)
        return
    from nagjax.generate.evaluate import evaluate

    scores = evaluate(run, data=data, batches=batches)
    if as_json:
        print(json.dumps(scores))
        return
    for name, value in scores.items():
        if isinstance(value, int | float):
            print(f"{name:15} {value:.6g}" if isinstance(value, float) else f"{name:15} {value}")


def _benchmarks(run: Path, tasks: str, folder: Path | None, fewshot: int | None, limit: int | None, as_json: bool):
    from nagjax.interop.lm_eval import evaluate_tasks
    from nagjax.runs.lock import lock_of_report
    from nagjax.runs.opening import open_run

    names = [name.strip() for name in tasks.split(",") if name.strip()]
    opened = open_run(run)
    with lock_of_report(run, "eval", "run"):
        scores = evaluate_tasks(opened, names, task_folder=folder, fewshot=fewshot, limit=limit)
    if as_json:
        print(json.dumps(scores))
        return
    for task, metrics in scores.items():
        for metric, value in metrics.items():
            print(f"{task:24} {metric:24} {value:.6g}")
