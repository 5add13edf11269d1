"""Runs of two processes with four devices each, on this machine's loopback."""

import contextlib
import dataclasses
import json
import os
import pickle
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from nagjax.data import DataConfig, prepare
from nagjax.mod import ModConfig
from nagjax.residual import find_scheme
from nagjax.runs.config import MeshConfig
from nagjax.train.distributed.hosts import HostsConfig
from tests import tiny

ROOT = Path(__file__).parents[2]
SPIKE = 1.5
TEXTS = (  # name, words, share of the mixture
    ("foxes", "the quick brown fox jumps over it. ", "0.9@0,0.3@0.8"),
    ("ideas", "colourless green ideas. ", "0.2"),
)
LIMIT = 600  # seconds for one host, all its runs together; a third of it is usual on two cores


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """A tiny routed run on a mixture whose weights change, with its parameters spread over all eight devices, and which
    is scored on a question."""
    folder, mix = tmp_path_factory.mktemp("text"), []
    for name, words, weight in TEXTS:
        lines = [json.dumps({"text": f"{name} {i}: " + words * (3 + i % 5)}) for i in range(30)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines))
        prepare([str(folder / f"{name}.jsonl")], folder / name, validation=0.3)
        mix.append(f"{folder / name}={weight}")
    question = {"context": "the quick brown", "choices": [" fox", " it"], "answer": 0}
    (folder / "fox.jsonl").write_text(json.dumps(question))
    train = dict(steps=6, batch=8, eval_every=3, eval_batches=2, save_every=2, keep=9, spike=SPIKE)
    train |= {"tasks": (str(folder / "fox.jsonl"),)}
    routed = dict(depth=2, context=16, mod=ModConfig(rate=(0.5,)))
    made = tiny.run_config(find_scheme("nag")(), optimizer={"lr": 0.03}, train=train, **routed)
    return dataclasses.replace(made, data=DataConfig(mix=tuple(mix)), mesh=MeshConfig(data=1, fsdp=8))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """`hosts(runs, schemes)`: two processes take a few steps of each scheme (given with its initial values), and go
    through the runs, each with what its own `faults[index]` does to it; returns their exit codes, what they noted, and
    what they printed."""
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": "4",
        "PYTHONPATH": str(ROOT),
        "HOST_LIMIT": str(LIMIT),
    }
    command = [sys.executable, str(Path(__file__).parent / "host.py")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    starter = subprocess.Popen(command, env=environment, start_new_session=True, **pipes)

    def go(*runs: dict, schemes=()) -> tuple[list[int], list[list[dict]], list[str]]:
        folder = tmp_path_factory.mktemp("hosts")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            coordinator = f"127.0.0.1:{free.getsockname()[1]}"
        jobs = [str(folder / f"{index}.job") for index in range(2)]
        for index, path in enumerate(jobs):
            mine = [{k: v for k, v in r.items() if k != "faults"} | r.get("faults", {}).get(index, {}) for r in runs]
            job = {"hosts": HostsConfig(coordinator, 2, index), "runs": mine, "schemes": schemes}
            job |= {"log": str(folder / f"{index}.log"), "printed": str(folder / f"{index}.out")}
            Path(path).write_bytes(pickle.dumps(job))
        starter.stdin.write(json.dumps(jobs) + "\n")
        starter.stdin.flush()
        codes = json.loads(starter.stdout.readline())
        notes = [[json.loads(line) for line in (folder / f"{i}.log").read_text().splitlines()] for i in range(2)]
        return codes, notes, [(folder / f"{i}.out").read_text() for i in range(2)]

    yield go
    starter.stdin.close()
    with contextlib.suppress(ProcessLookupError):
        os.killpg(starter.pid, signal.SIGKILL)
    starter.wait()
