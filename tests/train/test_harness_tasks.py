"""Tasks of lm-evaluation-harness while a run trains: the numbers of `nagjax eval`, and what is refused."""

import json

import numpy as np
import pytest

from nagjax.cli import main
from nagjax.errors import UserError
from nagjax.runs import names
from nagjax.runs.metrics import comparable
from nagjax.train.harness_tasks import harness_tasks
from nagjax.train.loop import train

pytest.importorskip("lm_eval", reason="needs the extra eval: make test-eval")

TASK = """
task: {name}
dataset_path: json
dataset_kwargs:
  data_files:
    test: {rows}
test_split: test
fewshot_split: test
num_fewshot: {shots}
output_type: {kind}
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
"""
METRIC = """  - metric: {}
    aggregation: {}
    higher_is_better: true
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two tasks of likelihoods, and one that asks for text."""
    folder = tmp_path_factory.mktemp("tasks")
    rows = [{"question": f"Is {i} even?", "choices": ["yes", "no"], "answer": i % 2} for i in range(6)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task = lambda name, kind, shots=0: TASK.format(name=name, kind=kind, shots=shots, rows=folder / "rows.jsonl")  # noqa: E731
    choices = 'doc_to_choice: "{{choices}}"\n'
    text = task("even", "multiple_choice", 1).replace("metric_list", f"{choices}metric_list")
    (folder / "even.yaml").write_text(text + METRIC.format("acc", "mean") + METRIC.format("acc_norm", "mean"))
    text = task("digit", "loglikelihood")
    (folder / "digit.yaml").write_text(text + METRIC.format("perplexity", "perplexity") + METRIC.format("acc", "mean"))
    (folder / "wordy.yaml").write_text(task("wordy", "generate_until") + METRIC.format("exact_match", "mean"))
    return folder


def test_scores_are_those_of_the_harness(folder, run_of, tmp_path, capsys):
    tasks = str(folder / "even.yaml"), str(folder / "digit.yaml")
    run = train(run_of(ema=0.5, tasks=tasks, tasks_limit=5), tmp_path / "run")
    logged = [record for record in comparable(run / names.METRICS) if record["kind"] == "tasks"]
    assert [record["step"] for record in logged] == [0, 3, 6]
    args = ["--task-folder", str(folder), "--limit", "5", "--as-json"]
    assert main(["eval", str(run), "--tasks", "even,digit", *args]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    want = {f"{task}/{name.split(',')[0]}": v for task, own in told.items() for name, v in own.items()}
    found = {name: value for name, value in logged[-1].items() if name in want}
    assert found == pytest.approx({name: value for name, value in want.items() if "stderr" not in name}, rel=1e-5)
    assert {"even/acc", "even/acc_norm", "digit/perplexity"} <= found.keys() and np.isfinite(list(found.values())).all()


def test_refusals(folder, run_of, tmp_path):
    (tmp_path / "no.yaml").write_text("group: all\n")
    (tmp_path / "gone.yaml").write_text((folder / "even.yaml").read_text().replace("rows.jsonl", "gone.jsonl"))
    for path, words in (
        (folder / "wordy.yaml", "asks for generate_until: leave it to nagjax eval"),
        (folder / "none.yaml", "cannot be read"),
        (tmp_path / "no.yaml", "names no task"),
        (tmp_path / "gone.yaml", "cannot be opened"),
    ):
        with pytest.raises(UserError, match=words) as caught:
            harness_tasks(str(path))
        assert caught.value.field == "tasks"
