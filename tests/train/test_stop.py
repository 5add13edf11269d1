"""Preemption: SIGTERM saves and ends with code 0, wherever it comes, and nothing is lost by it."""

import concurrent.futures
import fcntl
import json
import os
import resource
import shutil
import signal
import time

import pytest

from nagjax.errors import Preempted
from nagjax.runs.metrics import comparable
from nagjax.train import loop as loop_module
from nagjax.train.checkpoint.store import Checkpoints, steps_saved
from nagjax.train.evaluator import Evaluator
from nagjax.train.loop import train
from nagjax.train.safety.stop import Stopper


@pytest.fixture(scope="module")
def config(run_of):
    return run_of(scheme="plain", eval_batches=2, keep=3)


@pytest.fixture(scope="module")
def in_another_thread(config, tmp_path_factory):
    """A run that another thread trains, and who answers SIGTERM before and after."""
    before = signal.getsignal(signal.SIGTERM)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        folder = pool.submit(train, config, tmp_path_factory.mktemp("runs") / "unbroken").result()
    return folder, before, signal.getsignal(signal.SIGTERM)


@pytest.fixture(scope="module")
def unbroken(in_another_thread):
    return in_another_thread[0]


@pytest.fixture
def nearly(unbroken, tmp_path):
    """The run as it was after four of its six steps."""
    shutil.copytree(unbroken, tmp_path / "nearly")
    shutil.rmtree(tmp_path / "nearly" / "checkpoints" / "6")
    return tmp_path / "nearly"


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


def test_in_steps_and_in_evaluations_which_are_then_made_after_the_resume(
    config, unbroken, tmp_path, monkeypatch, capsys
):
    folder, handler = tmp_path / "run", signal.getsignal(signal.SIGTERM)
    comes = {
        3: lambda patched: signal_in_evaluation_at(patched, 3),
        5: lambda patched: signal_at_step(patched, 2),  # after the resume
        6: lambda patched: signal_in_evaluation_at(patched, 6),
    }
    for at, come in comes.items():
        with monkeypatch.context() as patched, pytest.raises(Preempted) as stopped:
            come(patched)
            train(config, folder)
        assert not stopped.value.code and signal.getsignal(signal.SIGTERM) is handler
        assert f"stopped at step {at} as asked (SIGTERM)" in capsys.readouterr().err
        assert steps_saved(folder / "checkpoints")[-1] == at and not lines_at(folder, at, "eval")
    train(config, folder)
    assert comparable(folder / "metrics.jsonl") == comparable(unbroken / "metrics.jsonl")
    with Checkpoints(folder / "checkpoints") as checkpoints:
        last = checkpoints.facts(6)
        assert last == {"evaluated": True, "score": lines_at(folder, 6, "eval")[0]["loss"]}


@pytest.mark.parametrize("number, raised", [(signal.SIGTERM, Preempted), (signal.SIGINT, KeyboardInterrupt)])
def test_in_the_last_save_it_still_ends_the_process(config, unbroken, nearly, monkeypatch, capsys, number, raised):
    """Or a sweep would begin its next run."""
    save = Checkpoints.save

    def signalled(self, step, *rest):
        save(self, step, *rest)
        if step == 6:
            signal.raise_signal(number)

    monkeypatch.setattr(Checkpoints, "save", signalled)
    with pytest.raises(raised):
        train(config, nearly)
    assert raised is KeyboardInterrupt or "nothing is left to do" in capsys.readouterr().err
    assert steps_saved(nearly / "checkpoints")[-1] == 6
    assert comparable(nearly / "metrics.jsonl") == comparable(unbroken / "metrics.jsonl")


def test_before_the_first_step_there_is_nothing_to_save(config, tmp_path, monkeypatch):
    signal_in_evaluation_at(monkeypatch, 0)
    with pytest.raises(Preempted):
        train(config, tmp_path / "run")
    assert steps_saved(tmp_path / "run" / "checkpoints") == []


def test_a_request_is_heard_whatever_the_number_of_its_descriptor(monkeypatch, capsys):
    """A large corpus opens more files than `select` takes."""
    made, (soft, hard) = os.pipe, resource.getrlimit(resource.RLIMIT_NOFILE)

    def high():
        read, write = made()
        moved = fcntl.fcntl(read, fcntl.F_DUPFD, 1500)
        os.close(read)
        return moved, write

    monkeypatch.setattr(os, "pipe", high)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 2000)), hard))
    try:
        with Stopper() as stopper:
            stopper.settled = True
            signal.raise_signal(signal.SIGTERM)
            said, until = "", time.monotonic() + 30
            while "asked to stop (SIGTERM)" not in said and time.monotonic() < until:
                time.sleep(0.01)
                said += capsys.readouterr().err
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "asked to stop (SIGTERM)" in said


def test_in_another_thread_signals_are_left_to_the_main_one(in_another_thread):
    """What it trains is what the main one trains in the tests above."""
    folder, before, after = in_another_thread
    assert after is before and steps_saved(folder / "checkpoints")[-1] == 6


def test_interrupt_is_no_success(config, nearly, monkeypatch):
    shutil.rmtree(nearly / "checkpoints" / "4")
    signal_at_step(monkeypatch, 3, signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        train(config, nearly)
    assert steps_saved(nearly / "checkpoints") == [2, 4, 5]
