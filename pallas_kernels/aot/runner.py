"""Starts one compiler process per target and limits the time of every compilation."""

import dataclasses
import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from pallas_kernels.aot.cases import Case
from pallas_kernels.aot.targets import Target, compilers_environment

SECONDS_PER_COMPILE = 600.0  # half a minute on an idle machine
# With these settings XLA and Mosaic GPU print the output of the GPU's assembler.
ASSEMBLER = {"TF_CPP_MIN_LOG_LEVEL": "0", "TF_CPP_VMODULE": "subprocess_compilation=3", "MOSAIC_GPU_DUMP_PTXAS": "1"}
WORKER = (sys.executable, "-m", "pallas_kernels.aot.worker")


def run(
    target: Target,
    cases: Sequence[Case],
    *,
    seconds: float = SECONDS_PER_COMPILE,
    worker: Sequence[str] = WORKER,
) -> Iterator[tuple[Case, dict]]:
    """Yields every case with its figures and problems, as they arrive.

    A case that takes longer than `seconds`, or whose compiler dies, is reported as a problem; the other cases
    continue in a fresh process. Loading the compiler has the same limit.
    """
    rest = list(cases)
    while rest:
        done = 0
        for result in _one_process(target, rest, seconds, worker):
            yield rest[done], result
            done += 1
        rest = rest[done:]


def _one_process(target, cases, seconds, worker) -> Iterator[dict]:
    """Yields results in order, until all cases are done or the process has failed. Yields at least one result."""
    root = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))
    order = json.dumps({"target": target.name, "cases": [dataclasses.asdict(c) for c in cases]})
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            worker,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=compilers_environment() | ASSEMBLER | {"PYTHONPATH": paths},
        )
        lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=_read, args=(process.stdout, lines), daemon=True).start()
        try:
            process.stdin.write(order)
            process.stdin.close()
            finished = 0
            while finished < len(cases):
                try:
                    line = lines.get(timeout=seconds)
                except queue.Empty:
                    yield {"problems": [f"not compiled within {seconds:g} s"]}
                    return
                if line is None:
                    errors.seek(0)
                    end = errors.read()[-1500:]
                    yield {"problems": [f"the compiler's process ended with {process.wait()}: {end}"]}
                    return
                message = json.loads(line)
                if "end" in message:
                    finished += 1
                    yield {key: value for key, value in message.items() if key != "end"}
        finally:
            process.kill()
            process.wait()


def _read(stream, lines: queue.Queue) -> None:
    for line in stream:
        if line.startswith("{"):  # compilers write to standard output too
            lines.put(line)
    lines.put(None)
