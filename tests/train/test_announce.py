"""What a run says before it begins, what it refuses to begin, and that a signal ends it while it compiles."""

import json
import os
import re
import signal
import subprocess
import sys
import time

import jax
import pytest

from nagjax import console
from nagjax.cli import main
from nagjax.errors import UserError
from nagjax.residual import find_scheme
from nagjax.train import announce
from nagjax.train import loop as loop_module
from nagjax.train.abstract_step import abstract_batch
from nagjax.train.announce import available_bytes, check_memory, host_bytes, least_bytes
from nagjax.train.logging.console import ProgressLine
from nagjax.train.loop import train
from nagjax.train.step import jit_train_step
from tests import tiny

TINY = "--depth 1 --width 16 --context 32 --batch 8 --steps 3 --eval-batches 1".split()


def test_a_run_says_what_it_will_do_before_it_does_it(tmp_path, capsys):
    assert main(["train", *TINY, "--scheme", "plain", "--out", str(tmp_path / "run")]) == 0
    first, second, third, *_, last, _, _ = capsys.readouterr().out.strip().split("\n")
    assert first == f"plain, 1 blocks x 16, 3 steps of 8 x 32 = 256 tokens, in {tmp_path / 'run'}"
    found = re.fullmatch(
        r"plain pre-norm: ([\d,]+) parameters on \d+ x \w+.*; 256 tokens a step; at least (\S+) GiB a device"
        r"(, \S+ free)?; compiling",
        second,
    )
    assert re.fullmatch(r"text: stdlib, [\d,]{7,} tokens, read \S+ times", third)
    assert found and last == f"finished: {tmp_path / 'run'}"


def test_the_bound_lies_below_what_the_compiler_counts():
    in_chunks = {"vocab": 4096, "context": 64, "train": {"loss_chunk": 32}, "depth": 1}
    for changes in ({}, {"vocab": 512}, {"depth": 12, "remat": "block"}, in_chunks):
        blueprint = tiny.blueprint(tiny.run_config(find_scheme("plain")(), **changes))
        lowered = jit_train_step(blueprint).lower(blueprint.abstract(), abstract_batch(blueprint))
        used = lowered.compile().memory_analysis()
        total = used.argument_size_in_bytes + used.temp_size_in_bytes
        assert 0.2 * total < least_bytes(blueprint) <= total


def test_a_model_split_over_devices_needs_less_on_each():
    config = tiny.run_config(find_scheme("plain")(), width=64, vocab=1024)
    one, four = (least_bytes(tiny.blueprint(config, 1, fsdp)) for fsdp in (1, 4))
    assert four < 0.4 * one


class Made(Exception):
    """Where a run would make its state."""


def made(*_):
    raise Made


def test_what_cannot_fit_is_refused_before_it_is_made(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(announce, "host_bytes", lambda: 10_000)
    config = tiny.run_config(find_scheme("plain")(), train={"steps": 1, "eval_batches": 1}, vocab=257, context=16)
    with pytest.raises(UserError, match="memory = '0.00 GiB': .*--mesh.fsdp.*--force"):
        train(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match="memory"):
        check_memory(tiny.blueprint(config))
    monkeypatch.setattr(loop_module, "state_at", made)
    with pytest.raises(Made):
        train(config, tmp_path / "run", force=True)
    monkeypatch.setattr(announce, "host_bytes", lambda: None)
    check_memory(tiny.blueprint(config))


def test_memory_that_is_free():
    mesh = tiny.blueprint(tiny.run_config(find_scheme("plain")()), 2).mesh
    assert 2**20 < host_bytes() < 2**50
    if jax.devices()[0].platform == "cpu":
        assert available_bytes(mesh) <= host_bytes() * 1.5 / 2


def test_the_time_left_leaves_compiling_out(monkeypatch, capsys):
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    line = ProgressLine("NAG", 10, 100, every=0.0)
    for step, at in enumerate((60.0, 90.0, 91.0, 92.0), 1):
        now[0] = at
        line.update(step, 2.0)
    told = capsys.readouterr().err.strip().split("\n")
    assert told[0] == "NAG  step 1/10  loss 2.0000" and told[1] == "NAG  step 2/10  loss 2.0000"
    assert told[3] == "NAG  step 4/10  loss 2.0000  100 tokens/s  ETA 0:06"


def test_progress_is_told_now_and_then(monkeypatch):
    now, told = [0.0], []
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = console.Progress("blocks:", 100, tell=told.append)
    for done in range(1, 13):
        now[0] += 1.0
        progress(done, "so far")
    assert told == ["blocks: 5/100, so far, 1:35 left", "blocks: 10/100, so far, 1:30 left"]
    assert console.clock(3725) == "1:02:05"


def test_a_signal_while_it_compiles_ends_it_soon(tmp_path):
    """The compiler does not return to Python; here a call that never returns stands in for it."""
    script = tmp_path / "run.py"
    script.write_text(HANGING)
    run = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    compiling = sorted(int(run.stdout.readline()) for _ in range(2))
    began = time.monotonic()
    for pid, number in zip(compiling, (signal.SIGTERM, signal.SIGINT), strict=True):
        os.kill(pid, number)
    codes, errors = run.communicate(timeout=60)
    assert json.loads(codes) == [0, 130] and time.monotonic() - began < 10
    assert errors.count("as asked") == 2 and "Traceback" not in errors


HANGING = """
import ctypes, os
from nagjax.train.safety.stop import Stopper

def compile():
    with Stopper():
        print(os.getpid(), flush=True)
        while True:
            ctypes.CDLL(None).poll(None, 0, 1000000)

pids = [os.fork() or compile() for _ in range(2)]  # it is the imports that take time
ended = dict(os.wait() for _ in pids)
print([os.waitstatus_to_exitcode(ended[pid]) for pid in sorted(pids)])
"""


def test_what_is_said_may_have_lost_its_reader(tmp_path):
    """Standard error's, as in `2>&1 | tee log` after Ctrl-C; standard output's is the command's own affair."""
    script = "from nagjax.console import note, say\nnote('a' * 9)\nnote('b')\n{}"
    for more, code in (("", 0), ("say('c')", 1)):
        read, write = os.pipe()
        os.close(read)
        command = [sys.executable, "-c", script.format(more)]
        assert subprocess.run(command, stdout=write, stderr=write).returncode == code
        os.close(write)
