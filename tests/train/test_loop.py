"""A run trains, writes all its files, and continues bit for bit after a kill."""

import json
import os
import pickle
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from nagjax.runs.config import to_dict
from nagjax.runs.metrics import comparable
from nagjax.train.checkpoint.store import Checkpoints
from nagjax.train.distributed.mesh import make_mesh
from nagjax.train.facts import resolve
from nagjax.train.loop import train
from nagjax.train.state import Blueprint

KILLED = """
import os, pickle, signal, sys
from nagjax.train.loop import train
from nagjax.train.logging.metrics import Writers

write = Writers.write
def killing(self, kind, step, **values):
    write(self, kind, step, **values)
    if (kind, step) == ("train", 5):
        os.kill(os.getpid(), signal.SIGKILL)
Writers.write = killing
train(pickle.load(open(sys.argv[1], "rb")), sys.argv[2])
"""


def records(folder):
    return comparable(folder / "metrics.jsonl")


def final_state(config, folder):
    config = resolve(config)
    with Checkpoints(folder / "checkpoints") as checkpoints:
        state = checkpoints.restore(Blueprint.of(config, make_mesh(config.mesh)).abstract())
        return checkpoints.latest, jax.device_get(state)


@pytest.fixture(scope="module")
def unbroken(run_of, tmp_path_factory):
    return train(run_of(), tmp_path_factory.mktemp("runs") / "unbroken")


def test_a_run_trains_and_records_itself(run_of, unbroken):
    seen = records(unbroken)
    assert [r["step"] for r in seen if r["kind"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [r["step"] for r in seen if r["kind"] == "eval"] == [0, 3, 6]
    evals = [r for r in seen if r["kind"] == "eval"]
    assert evals[-1]["loss"] < evals[0]["loss"] - 0.1
    for r in seen:
        if r["kind"] == "train":
            assert {"loss", "accuracy", "grad_norm", "lr", "count", "tokens"} <= set(r)
            assert r["tokens"] == r["step"] * 4 * 16 and 0 < r["count"] <= 64 and np.isfinite(r["grad_norm"])
        if r["kind"] == "eval":
            assert 0 < r["bits_per_byte"] and 0 <= r["accuracy"] <= 1
        if r["kind"] == "depth":
            assert {len(r[name]) for name in ("turn", "ratio", "growth", "gate", "closed")} == {4}
            np.testing.assert_allclose(np.diff(r["log_norm"]), r["growth"], atol=1e-5)
    config = resolve(run_of())
    assert json.loads((unbroken / "config.json").read_text()) == json.loads(json.dumps(to_dict(config)))
    info = json.loads((unbroken / "info.json").read_text())
    assert info["devices"] == 1 and info["parameters"] == sum(info["parameters_by_part"].values())
    before = (unbroken / "metrics.jsonl").read_bytes()
    train(run_of(), unbroken)  # a finished run is left as it is
    assert (unbroken / "metrics.jsonl").read_bytes() == before


def test_killed_and_resumed_equals_unbroken_bit_for_bit(run_of, unbroken, tmp_path):
    (tmp_path / "config").write_bytes(pickle.dumps(run_of()))
    environment = os.environ | {"JAX_LOG_COMPILES": "1"}
    folder = tmp_path / "killed"
    command = [sys.executable, "-c", KILLED, str(tmp_path / "config"), str(folder)]
    killed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL, killed.stderr[-2000:]
    assert [r["step"] for r in records(folder)][-1] == 5
    compiled = killed.stderr.count("Compiling jit(step)")
    assert compiled == 2, f"one program to train and one to evaluate, not {compiled}, in a fresh interpreter"

    train(run_of(), folder)
    assert records(folder) == records(unbroken)
    (step, state), (want_step, want) = (final_state(run_of(), f) for f in (folder, unbroken))
    assert step == want_step == 6
    jax.tree.map(np.testing.assert_array_equal, state, want)
    events = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines() if "event" in line]
    assert len(events) == 1 and events[0]["step"] in (2, 4)  # was 4 whole?
    assert events[0]["message"].startswith("resumed")  # what follows is the commit, where that has changed meanwhile
