"""Tasks scored while a run trains: what they measure, that they change nothing of it, and what is refused."""

import dataclasses
import json
import math
import shutil
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from nagjax.cli import main
from nagjax.config_file import read_config_file
from nagjax.data.tokenizer import ByteTokenizer, NoTokenizer
from nagjax.errors import Preempted, UserError
from nagjax.generate.weights import with_weights
from nagjax.options import read_options
from nagjax.report.table import comparison_table, to_html
from nagjax.runs import names
from nagjax.runs.config import MeshConfig, TrainConfig
from nagjax.runs.log import load_run
from nagjax.runs.metrics import comparable
from nagjax.runs.opening import open_run
from nagjax.train.checkpoint.store import Checkpoints
from nagjax.train.distributed.mesh import make_mesh
from nagjax.train.facts import resolve
from nagjax.train.logging.console import ProgressLine
from nagjax.train.loop import train
from nagjax.train.safety.stop import Stopper
from nagjax.train.score import score_padded
from nagjax.train.state import Blueprint
from nagjax.train.tasks import Questions, open_tasks, task_names
from tests.tolerance import close_to

ROWS = [
    {"context": "the quick", "choices": [" brown", " zebra", " of"], "answer": 0},
    {"context": "the quick brown fox jumps over it. the ", "choices": ["quick", "seventh"], "answer": 0, "id": "b"},
    {"context": "", "choices": ["document", "nothing"], "answer": 1},
    {"context": "jumps over", "choices": [" it", " a"], "answer": 1},
    {"context": "fox", "choices": [" jumps", " is"], "answer": 0},
]


@pytest.fixture(scope="module")
def questions(tmp_path_factory):
    path = tmp_path_factory.mktemp("tasks") / "fox.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return str(path)


@pytest.fixture(scope="module")
def with_tasks(run_of, questions):
    """`with_tasks(steps=6)`: a run with an average of its weights that is scored with every evaluation."""
    return lambda **changes: run_of(**dict(ema=0.5, keep=3, tasks=(questions,)) | changes)


@pytest.fixture(scope="module")
def whole(with_tasks, tmp_path_factory):
    return train(with_tasks(), tmp_path_factory.mktemp("runs") / "whole")


def records(folder, *kinds):
    return [record for record in comparable(folder / names.METRICS) if record["kind"] in kinds]


def state_of(config, folder):
    config = resolve(config)
    with Checkpoints(folder / names.CHECKPOINTS) as checkpoints:
        return jax.device_get(checkpoints.restore(Blueprint.of(config, make_mesh(config.mesh)).abstract(), 6))


def by_hand(run, rows):
    """The three metrics, from the float64 log-softmax of the logits behind each text of bytes."""
    right, normed, nats, size = [], [], 0.0, 0
    forward = jax.jit(lambda tokens: run.model.logits(run.model(tokens, progress=run.progress)))
    for row in rows:
        found = []
        for choice in row["choices"]:
            before, whole = list(row["context"].rstrip().encode()) or [256], list((row["context"] + choice).encode())
            ids = [*before, *whole[len(row["context"].rstrip().encode()) :]]
            kept = ids[-(run.config.model.context + 1) :]
            padded = np.array([kept[:-1] + [0] * (run.config.model.context + 1 - len(kept))])  # for one program
            logits = np.asarray(forward(padded)[0, : len(kept) - 1], float)
            logs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            own = range(len(kept) - 1 - (len(ids) - len(before)), len(kept) - 1)
            found.append(sum(logs[i, kept[i + 1]] for i in own))
        right.append(int(np.argmax(found)) == row["answer"])
        lengths = [len(choice.strip()) for choice in row["choices"]]
        normed.append(int(np.argmax(np.divide(found, lengths))) == row["answer"])
        nats -= found[row["answer"]]
        size += len((row["context"] + row["choices"][row["answer"]]).encode()) - len(row["context"].rstrip().encode())
    return {"acc": np.mean(right), "acc_norm": np.mean(normed), "bits_per_byte": nats / math.log(2) / size}


def test_scores_are_those_of_the_weights_that_are_validated(whole, questions, capsys):
    """Of the last step's, by hand from the run as it is opened, which is its average; and by `nagjax eval`."""
    logged = records(whole, "tasks")
    assert [record["step"] for record in logged] == [0, 3, 6]
    want = by_hand(open_run(whole), ROWS)
    assert logged[-1]["tokens"] == 6 * 4 * 16
    assert {name: logged[-1][f"fox/{name}"] for name in want} == {
        name: close_to(value, terms=64, chain=24) for name, value in want.items()
    }
    assert logged[-1]["fox/bits_per_byte"] < logged[0]["fox/bits_per_byte"]
    assert main(["eval", str(whole), "--tasks", questions, "--as-json"]) == 0
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert told == {"fox": {name: pytest.approx(logged[-1][f"fox/{name}"], rel=1e-5) for name in want}}
    report = json.loads((whole / names.TASKS).read_text())
    assert report["results"] == told and report["step"] == 6 and report["weights"] == "full"


def test_bits_are_per_byte_of_what_was_scored(tmp_path):
    """Of bytes at one bit each, spaces that the choices took over from their contexts among them."""
    rows = [("a", " b"), ("a ", "b"), ("a\u3000 \n", "bé"), ("  ", "b"), ("", "b")]
    path = tmp_path / "spaces.jsonl"
    path.write_text("".join(json.dumps({"context": c, "choices": [w, "x"], "answer": 0}) + "\n" for c, w in rows))
    (task,) = (found := open_tasks([str(path)], ByteTokenizer(), 64)).tasks
    scores = [(-math.log(2) * len(continuation), True) for _, continuation in found.pairs]
    assert task.metrics(scores)["bits_per_byte"] == pytest.approx(1.0)


def test_training_is_the_same_without_them(whole, with_tasks, tmp_path):
    """Losses, evaluations and the whole state of the last step, bit for bit."""
    config = with_tasks(tasks=())
    plain = train(config, tmp_path / "plain")
    assert records(plain, "train", "eval", "depth") == records(whole, "train", "eval", "depth")
    assert not records(plain, "tasks")
    jax.tree.map(np.testing.assert_array_equal, state_of(config, plain), state_of(with_tasks(), whole))


def test_a_resumed_run_is_the_unbroken_one(whole, with_tasks, tmp_path):
    shutil.copytree(whole, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / names.CHECKPOINTS / "6")
    half = train(with_tasks(), tmp_path / "half")
    assert comparable(half / names.METRICS) == comparable(whole / names.METRICS)


def test_stopped_while_it_is_scored(whole, with_tasks, tmp_path, monkeypatch):
    """The whole evaluation is made again after the resume, and is there once."""
    watch, seen = Stopper.watch, []

    def watching(self, items):
        scoring = isinstance(items, range)
        for item in watch(self, items):
            seen.append(scoring)
            if sum(seen) == 5:  # of 3 batches at each evaluation, the second of the second one
                self.signal = signal.SIGTERM
            yield item

    monkeypatch.setattr(Stopper, "watch", watching)
    with pytest.raises(Preempted):
        train(with_tasks(), tmp_path / "run")
    assert [r["step"] for r in records(tmp_path / "run", "eval", "tasks")] == [0, 0]
    monkeypatch.undo()
    train(with_tasks(), tmp_path / "run")
    assert comparable(tmp_path / "run" / names.METRICS) == comparable(whole / names.METRICS)


def test_how_often_and_how_many(whole, with_tasks, tmp_path):
    """One program for all scorings of a run; and a finished half of a run may be scored otherwise."""
    shutil.copytree(whole, tmp_path / "half")
    for step in ("4", "6"):
        shutil.rmtree(tmp_path / "half" / names.CHECKPOINTS / step)
    compiled = score_padded._cache_size()
    half = train(with_tasks(tasks_every=6, tasks_limit=2), tmp_path / "half")
    assert [record["step"] for record in records(half, "tasks")] == [0, 6]
    assert records(half, "tasks")[-1]["fox/acc_norm"] == by_hand(open_run(half), ROWS[:2])["acc_norm"]
    assert score_padded._cache_size() <= compiled + 1  # a blueprint of its own


def test_on_eight_devices(with_tasks, questions, tmp_path):
    """And with the same scores by one device and by two that share the parameters."""
    config = with_tasks(mesh=MeshConfig(data=2, tensor=2, sequence=2), batch=8, scheme="plain")
    spread = train(config, tmp_path / "spread")
    plain = train(dataclasses.replace(config, train=dataclasses.replace(config.train, tasks=())), tmp_path / "plain")
    assert records(plain, "train", "eval") == records(spread, "train", "eval")
    jax.tree.map(np.testing.assert_array_equal, state_of(config, plain), state_of(config, spread))
    logged = records(spread, "tasks")[-1]
    for devices in (1, 2):
        run = open_run(spread, devices=jax.devices()[:devices])
        found = open_tasks([questions], run.tokenizer, 16).score(run)
        assert {name: logged[name] for name in found} == {
            name: close_to(score, terms=64, chain=24) for name, score in found.items()
        }


def test_reports_show_the_last_scores(whole):
    run = load_run(whole)
    assert run.task_scores["fox/acc"] == run.task_log[6]["fox/acc"] and sorted(run.task_log) == [0, 3, 6]
    table = comparison_table([run])
    found = dict(zip(table.columns, table.rows[0], strict=True))
    assert found["task fox/bits_per_byte"].text == f"{run.task_scores['fox/bits_per_byte']:.4f}"
    assert "task fox/acc" in to_html(table)


def test_the_progress_line_has_the_last_scores(capsys):
    line = ProgressLine("NAG", 10, 100, every=0.0)
    line.evaluated(0, 2.5, {"fox/acc": 0.25, "fox/acc_norm": 0.5, "owl/acc": 0.75})
    line.update(1, 2.0)
    found = "validation 2.5000  fox/acc 0.2500  owl/acc 0.7500\n"
    assert capsys.readouterr().err == f"NAG  step 1/10  loss 2.0000  {found}"
    line.evaluated(10, 2.5, {"fox/acc": 0.25, "owl/acc": 0.75})
    assert capsys.readouterr().err == f"NAG  step 10/10  {found}"


def test_the_same_option_everywhere(questions, tmp_path):
    (tmp_path / "run.yaml").write_text(f"tasks: [{questions}]\ntasks_every: 100\n")
    for options in (read_config_file(tmp_path / "run.yaml"), {"tasks": (questions,), "tasks_every": 100}):
        made = read_options(options).train
        assert (made.tasks, made.tasks_every) == ((questions,), 100)


def test_which_choice_is_taken(questions):
    """The likeliest, of equal ones the first; and by the nats of a character."""
    task = Questions(Path(questions))
    equal = task.metrics([(-1.0, True)] * len(task.texts))
    assert equal["acc"] == 3 / 5 and equal["acc_norm"] == 2 / 5  # the longest: of the first and the last
    assert equal["bits_per_byte"] == pytest.approx(5 / math.log(2) / len(" brown quicknothing a jumps"))
    scores = [(-2.5, True), (-3.0, True), (-1.1, True)]  # 5, 5 and 2 letters
    found = task.metrics(scores + [(-1.0, True)] * (len(task.texts) - 3))
    assert found["acc"] == 2 / 5 and found["acc_norm"] == 2 / 5


@pytest.mark.parametrize(
    "content, words",
    [
        (None, "cannot be read (No such file"),
        ("\n\n", "has no question"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 0}\n{"context": "a"', ".jsonl:2"),
        ('{"context": "a", "choices": ["b", "c"]}', "answer"),
        ('{"context": "a", "choices": ["b", "c"], "answer": 2}', "from 0 to 1"),
        ('{"context": "a", "choices": ["b", "c"], "answer": "0"}', "whole number"),
        ('{"context": "a", "choices": ["b"], "answer": 0}', "two or more"),
        ('{"context": "a", "choices": ["b", " "], "answer": 0}', "blank"),
        ('{"context": "a", "choices": ["b", "' + 17 * "c" + '"], "answer": 0}', "the model's context is 16"),
        ('["a"]', "JSON object"),
    ],
)
def test_bad_files_are_refused_before_anything_is_written(content, words, run_of, tmp_path):
    path = tmp_path / "bad.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UserError) as caught:
        train(run_of(tasks=(str(path),)), tmp_path / "run")
    assert caught.value.field == "tasks" and words in str(caught.value) and "bad.jsonl" in str(caught.value)
    assert not (tmp_path / "run").exists()


def test_other_refusals(run_of, questions, tmp_path, monkeypatch):
    with pytest.raises(UserError, match="multiple of eval_every 50; try 100"):
        TrainConfig(tasks_every=60)
    (tmp_path / "fox.jsonl").write_text(json.dumps(ROWS[0]))
    with pytest.raises(UserError, match="two tasks"):
        train(run_of(tasks=(questions, str(tmp_path / "fox.jsonl"))), tmp_path / "run")
    (tmp_path / "folder.jsonl").mkdir()
    with pytest.raises(UserError, match="is not a file"):
        train(run_of(tasks=(str(tmp_path / "folder.jsonl"),)), tmp_path / "run")
    asked, fewer = (open_tasks([Path(questions)], ByteTokenizer(), 16, limit) for limit in (None, 2))
    asked.check(asked.digest)
    with pytest.raises(UserError, match="tasks = 'fox'.*between hosts"):
        asked.check(fewer.digest)
    with pytest.raises(UserError, match="without a tokenizer.json"):
        open_tasks([questions], NoTokenizer(300), 16)
    monkeypatch.setitem(sys.modules, "lm_eval.tasks", None)
    with pytest.raises(UserError, match=r"tasks = 'arc_easy'.*pip install -e '.\[eval\]'"):
        train(run_of(tasks=("arc_easy",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_names_may_be_separated_by_spaces_and_commas(questions, tmp_path):
    other, third = tmp_path / "b.jsonl", tmp_path / "c,d.jsonl"
    for path in (other, third):
        shutil.copy(questions, path)
    for given in ([questions, str(other)], [f"{questions}, {other}"]):
        assert [task.name for task in open_tasks(given, ByteTokenizer(), 16).tasks] == ["fox", "b"]
    assert task_names([str(third), "x,y", ""]) == [str(third), "x", "y"]
    many = [f"task_{number}" for number in range(50)]  # together too long for the name of a file
    assert task_names([",".join(many)]) == many


@pytest.mark.parametrize("separate", [[","], []])
def test_eval_takes_both(separate, whole, questions, tmp_path, capsys):
    other = str(shutil.copy(questions, tmp_path / "b.jsonl"))
    names = [",".join((questions, other))] if separate else [questions, other]
    assert main(["eval", str(whole), "--as-json", "--limit", "2", "--tasks", *names]) == 0
    assert set(json.loads(capsys.readouterr().out.splitlines()[-1])) == {"fox", "b"}


def test_scores_of_other_tasks_stay(whole, questions, tmp_path, capsys):
    """If they are of the same weights and as many questions; that they are replaced is told."""
    run, other = shutil.copytree(whole, tmp_path / "run"), str(shutil.copy(questions, tmp_path / "b.jsonl"))
    (run / names.TASKS).unlink(missing_ok=True)  # by other tests
    stored = lambda: json.loads((run / names.TASKS).read_text())  # noqa: E731
    ask = lambda *options: main(["eval", str(run), "--limit", "2", "--tasks", *options])  # noqa: E731
    assert ask(questions) == 0
    before = stored()["results"]["fox"]
    assert ask(other) == 0
    assert stored()["tasks"] == [questions, other] and {*stored()["results"]} == {"fox", "b"}
    assert stored()["results"]["fox"] == before
    capsys.readouterr()
    assert ask(other, "--weights", "int8") == 0
    assert {*stored()["results"]} == {"b"} and "they are replaced" in capsys.readouterr().err
    (run / names.TASKS).write_text("damaged")
    assert ask(other) == 0 and {*stored()["results"]} == {"b"}


def test_eval_with_weights_of_8_bits(whole, questions, capsys):
    """Loss and tasks of the rounded matrices: close to those of the full ones, and not the same."""
    args = ["eval", str(whole), "--as-json", "--weights", "int8"]
    assert main([*args, "--batches", "1"]) == 0
    loss = json.loads(capsys.readouterr().out.splitlines()[-1])["loss"]
    logged = records(whole, "eval")[-1]["loss"]
    assert main([*args, "--tasks", questions]) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])["fox"]
    assert json.loads((whole / names.TASKS).read_text())["weights"] == "int8"
    want = by_hand(with_weights(open_run(whole), "int8"), ROWS)
    assert found == {name: close_to(value, terms=64, chain=24) for name, value in want.items()}
    assert 0 < abs(loss - logged) < 0.02 * logged and abs(loss - logged) > 1e-6 * logged


def test_weights_of_8_bits_are_for_one_device(whole):
    for devices in (2, 8):
        with pytest.raises(UserError, match="weights = 'int8'.*for one device"):
            with_weights(open_run(whole, devices=jax.devices()[:devices]), "int8")
