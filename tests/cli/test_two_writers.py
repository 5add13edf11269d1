"""Two writers of one run's folder: the second is refused whatever it would do, and the first, a real command, loses
nothing, nor does it when it is interrupted."""

import json
import signal
import subprocess
import sys
import time

import pytest

from nagjax.cli import main
from nagjax.data import prepare
from nagjax.runs import names
from nagjax.train.checkpoint.store import steps_saved

STEPS = 100_000
TINY = "--scheme plain --depth 1 --width 16 --context 16 --batch 2 --mesh.data 1 "
TINY += "--eval-batches 1 --eval-every 100000 --save-every 20"


@pytest.fixture(scope="module")
def commands(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 400)
    (folder / "b.txt").write_text("and the dog sleeps on. " * 40)
    prepare([str(folder / "a.txt")], folder / "corpus", validation=0.0, held_out=[str(folder / "b.txt")])
    out = folder / "run"
    train = ["train", *TINY.split(), "--steps", str(STEPS), "--data.path", str(folder / "corpus"), "--out", str(out)]
    return out, train


def start(args):
    return subprocess.Popen([sys.executable, "-m", "nagjax.cli", *args], stderr=subprocess.PIPE, text=True)


def until(what, process, seconds=240):
    deadline = time.monotonic() + seconds
    while not what():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()  # it would go on for long, and its errors are read to the end
            pytest.fail(process.communicate()[1])
        time.sleep(0.02)


def trained(out):
    """The steps in the log, whose last line may not be whole yet."""
    lines = (out / names.METRICS).read_text().split("\n")[:-1]
    return [line["step"] for line in map(json.loads, lines) if line["kind"] == "train"]


def test_the_second_writer_is_refused_and_the_first_loses_nothing(commands, capsys):
    out, train = commands
    first = start(train)
    try:
        until(lambda: steps_saved(out / names.CHECKPOINTS), first)
        first.send_signal(signal.SIGSTOP)
        for args in (train, [*train, "--fresh"]):
            capsys.readouterr()
            assert main(args) == 2
            said = capsys.readouterr().err
            last = said.strip().splitlines()[-1]
            assert f"is being written by process {first.pid} on " in last and f"kill {first.pid}" in last
            assert "deletes" not in said
        seen = len(trained(out))
        first.send_signal(signal.SIGCONT)
        until(lambda: len(trained(out)) > seen + 1, first)
        first.send_signal(signal.SIGINT)
        _, errors = first.communicate(timeout=120)
    finally:
        first.kill()
        first.wait()
    assert first.returncode == 130, errors
    assert "the same command goes on" in errors and "Traceback" not in errors
    steps = trained(out)
    assert steps == list(range(1, len(steps) + 1)) and steps_saved(out / names.CHECKPOINTS)[-1] == len(steps)
    assert not (out / names.LOCK).exists()
