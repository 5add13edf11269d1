"""Tasks of lm-evaluation-harness that ask for likelihoods, scored as `nagjax.train.tasks` scores its own: prompts and
metrics come from the harness, and the numbers equal those of `nagjax eval --tasks`."""

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from nagjax.errors import UserError

SEED = 1234  # seed for the examples in prompts, the default of the harness's own evaluation
YAML = (".yaml", ".yml")


class HarnessTask:
    """One task of the harness, whose requests are built once."""

    def __init__(self, task: Any, limit: int | None):
        self.name, self.task = task.config.task, task
        kind = task.OUTPUT_TYPE
        if kind not in ("multiple_choice", "loglikelihood"):
            raise UserError("tasks", self.name, f"asks for {kind}: leave it to nagjax eval, once the run is trained")
        task.set_fewshot_seed(seed=SEED)
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        self.texts = [request.args[:2] for request in task.instances]

    def metrics(self, scores: Sequence[tuple[float, bool]]) -> dict[str, float]:
        """The metrics by the harness's names; of a task with several filters, the metrics of the first filter."""
        for request, score in zip(self.task.instances, scores, strict=True):
            request.resps = [score]
            request.filtered_resps = {}
        self.task.apply_filters()
        questions = defaultdict(list)
        for request in self.task.instances:
            questions[request.doc_id].append(request)
        values = defaultdict(list)
        for asked in questions.values():
            asked.sort(key=lambda request: request.idx)
            answers = [next(iter(request.filtered_resps.values())) for request in asked]
            for metric, value in self.task.process_results(asked[0].doc, answers).items():
                values[metric].append(value)
        combine = self.task.aggregation()
        found = {metric: combine[metric](every) for metric, every in values.items() if metric in combine}
        return {metric: float(value) for metric, value in found.items() if isinstance(value, int | float)}


def harness_tasks(name: str, limit: int | None = None) -> list[HarnessTask]:
    """The task of this name, those of a group of this name, or the one in a .yaml file, with the first `limit` (None:
    all) questions of each.

    Raises UserError if the harness is not installed, if there is no such task, if its data cannot be read, or if it
    asks for more than likelihoods.
    """
    try:
        from lm_eval.tasks import TaskManager, get_task_dict
    except ImportError as missing:
        fix = f"needs lm-evaluation-harness ({missing}): pip install -e '.[eval]'; or give a file of questions, .jsonl"
        raise UserError("tasks", name, fix) from None
    path = Path(name) if name.endswith(YAML) else None
    asked = name if path is None else _named(path)
    manager = TaskManager() if path is None else TaskManager(include_path=str(path.parent), include_defaults=False)
    if asked not in manager.all_tasks:
        fix = f"is not among the {len(manager.all_tasks)} tasks of the harness, and no file of questions (.jsonl)"
        raise UserError("tasks", name, fix)
    try:
        return [HarnessTask(task, limit) for task in _leaves(get_task_dict([asked], manager))]
    except UserError:
        raise
    except Exception as error:  # reading its data can raise anything: no network, no data set, a bad template
        what = (str(error).splitlines() or [""])[0][:200]
        raise UserError("tasks", name, f"cannot be opened ({type(error).__name__}: {what}): try nagjax eval") from error


def _named(path: Path) -> str:
    try:
        found = re.search(r"^task:\s*[\"']?([^\s\"']+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    except (OSError, UnicodeDecodeError) as error:
        raise UserError("tasks", str(path), f"cannot be read ({error}): give a task of the harness") from None
    if found is None:
        raise UserError("tasks", str(path), "names no task: a file of the harness has a line task: NAME")
    return found[1]


def _leaves(tasks: dict) -> Iterator[Any]:
    for task in tasks.values():
        if isinstance(task, dict):
            yield from _leaves(task)
        else:
            yield task
