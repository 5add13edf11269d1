"""Works through a plan: finished jobs are skipped, and several processes or machines share the others.

A process takes the next job that nobody holds. A job is held by a lock (`nagjax.runs.lock`) on a folder inside its own.
The lock becomes free however its process ends: at once on the same machine, on others after two minutes (it takes up to
20 seconds to see whether a process of another machine is alive). Machines of an array (SLURM, TPU slices) each take
every n-th job, and the jobs that these wait for, such as the trials of a rate.
"""

import contextlib
import dataclasses
import json
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from experiments.harness.jobs import RECORD, Job, Record, execute, finished
from experiments.harness.recipe import HOME, Recipe, load, planned
from experiments.harness.settings import from_json
from nagjax.errors import UserError
from nagjax.memory import keep_freed_memory
from nagjax.processes import end, on_sigterm, shared_cores
from nagjax.runs.lock import Held, WriterLock


def work(jobs: Sequence[Job], folder: Path) -> None:
    """Does all jobs that are neither finished nor held by another process. Jobs that wait for one that is held come
    last."""
    for at_last in (False, True):
        for number, job in enumerate(jobs, start=1):
            if finished(job, folder) is not None or not at_last and _waits(job, folder):
                continue
            with _held(folder / job.name) as ours:
                if ours and finished(job, folder) is None:
                    record = execute(job, folder)
                    print(f"[{number}/{len(jobs)}] {job.name}  {_brief(record)}", flush=True)
                    jax.clear_caches()


def _waits(job: Job, folder: Path) -> bool:
    """Whether another process holds a job that this one needs."""
    return any(_elsewhere(need, folder) for need in getattr(job, "needs", ()) if finished(need, folder) is None)


def _elsewhere(job: Job, folder: Path) -> bool:
    with _held(folder / job.name) as ours:
        return not ours or _waits(job, folder)


def collect(jobs: Sequence[Job], folder: Path) -> list[Record] | None:
    """The records of all jobs; None while any is missing."""
    records = [finished(job, folder) for job in jobs]
    return None if None in records else records


def awaited(jobs: Sequence[Job], folder: Path) -> list[Record]:
    """The records of all these jobs. Does those that nobody else holds; waits for the others, checking every second."""
    work(jobs, folder)
    while (records := collect(jobs, folder)) is None:
        time.sleep(1.0)
        work(jobs, folder)
    return records


def work_in_processes(recipe: Recipe, settings, folder: Path, processes: int) -> None:
    """Runs `work` in several processes, each with its share of the cores. Their output goes to worker-N.log.

    Raises UserError if one of them failed.
    """
    jobs = planned(recipe, settings)
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "experiments.harness.sweep", recipe.name, str(folder.absolute())]
    command.append(json.dumps(dataclasses.asdict(settings)))
    with contextlib.ExitStack() as stack:
        logs = [stack.enter_context((folder / f"worker-{i}.log").open("w")) for i in range(processes)]
        options = {"cwd": HOME.parent, "env": shared_cores(processes), "stderr": subprocess.STDOUT}
        workers = [subprocess.Popen(command, stdout=log, **options) for log in logs]
        try:
            with on_sigterm(lambda *_: sys.exit(128 + signal.SIGTERM)):  # when terminated, it first ends the workers
                _watch(workers, jobs, folder)
        finally:
            codes = end(workers)
    failed = [i for i, code in enumerate(codes) if code not in (0, -signal.SIGTERM)]
    if failed:
        log = folder / f"worker-{failed[0]}.log"
        last = (log.read_text(encoding="utf-8").strip().splitlines() or ["no output"])[-1]
        raise UserError("processes", processes, f"a process failed ({last}); see {log}")


def _watch(workers: Sequence[subprocess.Popen], jobs: Sequence[Job], folder: Path) -> None:
    told = {job.name for job in jobs if (folder / job.name / RECORD).exists()}
    if told:
        print(f"{len(told)} of {len(jobs)} jobs were finished before", flush=True)
    while True:
        ended = all(worker.poll() is not None for worker in workers)
        for job in jobs:
            if job.name not in told and (record := finished(job, folder)) is not None:
                told.add(job.name)
                print(f"[{len(told)}/{len(jobs)}] {job.name}  {_brief(record)}", flush=True)
        if ended or any(worker.poll() for worker in workers):
            return
        time.sleep(1.0)


def _brief(record: Record) -> str:
    loss = record.metrics.get("loss")
    shown = "diverged  " if record.metrics.get("diverged") else f"loss {loss:.4f}  " if loss is not None else ""
    return f"{shown}{record.seconds:.0f} s"


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[bool]:
    """Whether this process now holds the folder. A job of several hosts is not locked: all of them run it together."""
    if jax.process_count() > 1:
        yield True
        return
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(WriterLock(folder / "held", "experiment"))
        except Held:
            yield False
            return
        yield True


def settings_from(recipe: Recipe, values: dict):
    """Settings of a recipe from their JSON form."""
    return from_json(type(recipe.sizes["smoke"]), values)


def _main(name: str, folder: str, settings: str) -> None:
    keep_freed_memory()
    recipe = load(name)
    work(planned(recipe, settings_from(recipe, json.loads(settings))), Path(folder))


if __name__ == "__main__":
    try:
        _main(*sys.argv[1:])
    except UserError as error:
        sys.exit(f"{error}")
