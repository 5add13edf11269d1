"""Preemption: SIGTERM saves and ends with code 0, wherever it comes, and nothing is lost by it."""

import concurrent.futures
import json
import signal

import pytest

from nagjax.errors import Preempted
from nagjax.runs.metrics import comparable
from nagjax.train import loop as loop_module
from nagjax.train.checkpoint.store import Checkpoints, steps_saved
from nagjax.train.evaluator import Evaluator
from nagjax.train.loop import train


@pytest.fixture(scope="module")
def unbroken(run_of, tmp_path_factory):
    return train(run_of(eval_batches=2), tmp_path_factory.mktemp("runs") / "unbroken")


def signal_at_step(monkeypatch, nth, number=signal.SIGTERM):
    make, seen = loop_module.jit_train_step, []

    def watched(blueprint):
        step = make(blueprint)

        def take(*args):
            seen.append(1)
            if len(seen) == nth:
                signal.raise_signal(number)
            return step(*args)

        return take

    monkeypatch.setattr(loop_module, "jit_train_step", watched)


def signal_in_evaluation_at(monkeypatch, at):
    evaluate = Evaluator.__call__

    def watched(self, params, mod, step, stream):
        def batches():
            for i, batch in enumerate(stream):
                if step == at and i == 1:
                    signal.raise_signal(signal.SIGTERM)
                yield batch

        return evaluate(self, params, mod, step, batches())

    monkeypatch.setattr(Evaluator, "__call__", watched)


def lines_at(folder, step, kind):
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [r for r in records if (r["step"], r["kind"]) == (step, kind)]


def test_in_a_step(run_of, unbroken, tmp_path, monkeypatch, capsys):
    signal_at_step(monkeypatch, 5)
    handler = signal.getsignal(signal.SIGTERM)
    with pytest.raises(Preempted) as stopped:
        train(run_of(eval_batches=2), tmp_path / "run")
    assert not stopped.value.code and signal.getsignal(signal.SIGTERM) is handler
    assert "stopped at step 5 as asked (SIGTERM)" in capsys.readouterr().err
    assert steps_saved(tmp_path / "run" / "checkpoints")[-1] == 5
    monkeypatch.undo()
    train(run_of(eval_batches=2), tmp_path / "run")
    assert comparable(tmp_path / "run" / "metrics.jsonl") == comparable(unbroken / "metrics.jsonl")


@pytest.mark.parametrize("at", [3, 6])
def test_in_an_evaluation_which_is_then_made_after_the_resume(run_of, unbroken, tmp_path, monkeypatch, at):
    folder = tmp_path / "run"
    signal_in_evaluation_at(monkeypatch, at)
    with pytest.raises(Preempted):
        train(run_of(eval_batches=2), folder)
    assert steps_saved(folder / "checkpoints")[-1] == at and not lines_at(folder, at, "eval")
    monkeypatch.undo()
    train(run_of(eval_batches=2), folder)
    assert comparable(folder / "metrics.jsonl") == comparable(unbroken / "metrics.jsonl")
    with Checkpoints(folder / "checkpoints") as checkpoints:
        last = checkpoints.facts(6)
        assert last == {"evaluated": True, "score": lines_at(folder, 6, "eval")[0]["loss"]}


@pytest.mark.parametrize("number, raised", [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)])
def test_in_the_last_save_it_still_ends_the_process(run_of, unbroken, tmp_path, monkeypatch, capsys, number, raised):
    """Or a sweep would begin its next run."""
    save = Checkpoints.save

    def signalled(self, step, *rest):
        save(self, step, *rest)
        if step == 6:
            signal.raise_signal(number)

    monkeypatch.setattr(Checkpoints, "save", signalled)
    with pytest.raises(raised):
        train(run_of(eval_batches=2), tmp_path / "run")
    assert raised is KeyboardInterrupt or "nothing is left to do" in capsys.readouterr().err
    assert steps_saved(tmp_path / "run" / "checkpoints")[-1] == 6
    assert comparable(tmp_path / "run" / "metrics.jsonl") == comparable(unbroken / "metrics.jsonl")


def test_before_the_first_step_there_is_nothing_to_save(run_of, tmp_path, monkeypatch):
    signal_in_evaluation_at(monkeypatch, 0)
    with pytest.raises(Preempted):
        train(run_of(eval_batches=2), tmp_path / "run")
    assert steps_saved(tmp_path / "run" / "checkpoints") == []


def test_in_another_thread_signals_are_left_to_the_main_one(run_of, unbroken, tmp_path):
    handler = signal.getsignal(signal.SIGTERM)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        folder = pool.submit(train, run_of(eval_batches=2), tmp_path / "run").result()
    assert signal.getsignal(signal.SIGTERM) is handler
    assert comparable(folder / "metrics.jsonl") == comparable(unbroken / "metrics.jsonl")


def test_interrupt_is_no_success(run_of, tmp_path, monkeypatch):
    signal_at_step(monkeypatch, 2, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(run_of(eval_batches=2), tmp_path / "run")
    assert steps_saved(tmp_path / "run" / "checkpoints") == [2]
