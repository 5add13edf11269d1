"""Two real commands in one run's folder: the second is refused whatever it would do, and the first loses nothing."""

import json
import signal
import subprocess
import sys
import time

import pytest

from nagjax.data import prepare
from nagjax.runs import names
from nagjax.train.checkpoint.store import steps_saved

STEPS = 400
TINY = "--depth 2 --width 16 --context 16 --batch 2 --eval-batches 1 --eval-every 1000 --save-every 20 --mesh.data 1"


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
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()[1]
        time.sleep(0.02)


def test_the_second_writer_is_refused_and_the_first_loses_nothing(commands):
    out, train = commands
    first = start(train)
    until(lambda: steps_saved(out / names.CHECKPOINTS), first)
    first.send_signal(signal.SIGSTOP)  # the others take seconds to start
    try:
        for args in (train, [*train, "--fresh"]):
            second = start(args)
            said = second.communicate()[1]
            assert second.returncode == 2
            last = said.strip().splitlines()[-1]
            assert f"is being written by process {first.pid} on " in last and f"kill {first.pid}" in last
            assert "deletes" not in said
    finally:
        first.send_signal(signal.SIGCONT)
    assert first.wait() == 0
    lines = [json.loads(line) for line in (out / names.METRICS).read_text().splitlines()]
    assert [line["step"] for line in lines if line["kind"] == "train"] == list(range(1, STEPS + 1))
    assert not (out / names.LOCK).exists()
