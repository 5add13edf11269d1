"""Signals that come to more than the trainer, or come again: to its group, to its workers, from its terminal."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import sys
import time

import psutil  # grain brings it

from nagjax.train.checkpoint.store import steps_saved

SIZES = "--depth 1 --width 16 --heads 2 --context 16 --batch 4 --mesh.data 1 --eval-batches 1 --steps 10000000".split()
NEVER = "--eval-every 10000000 --save-every 10000000".split()


def command(corpus, out, *more):
    return [
        sys.executable,
        "-m",
        "nagjax.cli",
        "train",
        *SIZES,
        *NEVER,
        "--data.path",
        corpus,
        "--out",
        str(out),
        *more,
    ]


def wait_for_steps(out, alive):
    metrics, deadline = out / "metrics.jsonl", time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count('"train"') > 3):
        assert alive() and time.monotonic() < deadline
        time.sleep(0.1)


def wait_until(done):
    deadline = time.monotonic() + 60
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def last_step(out):
    return json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"]


def in_session(leader):
    """The processes of a session, without the dead that nobody has waited for yet."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
            if os.getsid(process.pid) == leader and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
    return found


@contextlib.contextmanager
def session(command, **streams):
    """A process that leads a session of its own, in which nobody may be left."""
    leader = subprocess.Popen(command, start_new_session=True, **streams)
    try:
        yield leader
    finally:
        if left := in_session(leader.pid):
            os.killpg(leader.pid, signal.SIGKILL)
        leader.wait()
    assert not left


def test_to_the_whole_group_twice_it_still_saves(corpus, tmp_path):
    """A terminal's Ctrl-C and a scheduler's end reach the workers, too; `timeout` and `srun` send them again."""
    out, said = tmp_path / "run", tmp_path / "said"
    with said.open("w") as told, session(command(corpus, out, "--data.workers", "1"), stderr=told) as run:
        wait_for_steps(out, lambda: run.poll() is None)
        workers = [process for process in in_session(run.pid) if process != run.pid]
        assert workers
        for worker in workers:
            os.kill(worker, signal.SIGTERM)
        before = last_step(out)
        wait_until(lambda: last_step(out) > before + 40)  # more than are made ahead
        os.killpg(run.pid, signal.SIGINT)
        time.sleep(0.02)
        run.send_signal(signal.SIGINT)
        assert run.wait(timeout=120) == 130
        assert "Traceback" not in said.read_text() and "started again" not in said.read_text()
        assert steps_saved(out / "checkpoints") == [last_step(out)]
        wait_until(lambda: not in_session(run.pid))


def test_a_trainer_that_is_killed_leaves_no_worker(corpus, tmp_path):
    script = tmp_path / "run.py"
    script.write_text(READS)
    with session([sys.executable, str(script), corpus], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout.readline() == "reads\n" and len(in_session(trainer.pid)) > 1
        trainer.kill()
        trainer.wait()
        wait_until(lambda: not in_session(trainer.pid))


def test_a_terminal_that_closes_ends_it_with_everything_saved(corpus, tmp_path):
    out = tmp_path / "run"
    terminal, inside = pty.openpty()
    own = {name: inside for name in ("stdin", "stdout", "stderr")}
    run = subprocess.Popen([sys.executable, "-c", ON_A_TERMINAL, *command(corpus, out)], **own)
    os.close(inside)
    os.set_blocking(terminal, False)

    def alive():
        try:
            os.read(terminal, 1 << 16)  # or its output would fill up
        except BlockingIOError:
            pass
        return run.poll() is None

    try:
        wait_for_steps(out, alive)
        os.close(terminal)
        assert run.wait(timeout=120) == 0
    finally:
        run.kill()
    assert steps_saved(out / "checkpoints") == [last_step(out)]


ON_A_TERMINAL = """
import os
import signal
import sys

signal.signal(signal.SIGHUP, signal.SIG_DFL)  # as if these tests were not under nohup
os.login_tty(0)
os.execv(sys.argv[1], sys.argv[1:])
"""
READS = """
import signal
import sys
from nagjax.data import DataConfig, open_dataset
from nagjax.train.batches import TrainBatches

if __name__ == "__main__":
    TrainBatches(open_dataset(DataConfig(sys.argv[1], workers=1)), 4, 16).take(0)
    print("reads", flush=True)
    signal.pause()
"""
STUCK = """
import ctypes
import signal
from nagjax.train.safety.stop import Stopper

with Stopper() as stopper:
    stopper.settled = True
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])  # of this thread: what it waits for is not broken off
    print("in a step", flush=True)
    while True:
        ctypes.CDLL(None).poll(None, 0, 1000000)
"""


def test_once_more_after_a_while_ends_a_step_that_does_not_return(tmp_path):
    script = tmp_path / "run.py"
    script.write_text(STUCK)
    run = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout.readline() == "in a step\n"
    for pause in (0.05, 3.0, 0.0):
        run.terminate()
        time.sleep(pause)
        assert run.poll() is None or not pause
    _, errors = run.communicate(timeout=60)
    assert run.returncode == 128 + signal.SIGTERM and "without saving, as asked twice" in errors
    assert errors.count("asked to stop (SIGTERM): saves and ends after this step") == 1
