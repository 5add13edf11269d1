"""Runs of before: which of a plan's jobs result files already hold, and what a new file would lose of them."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from experiments.harness.jobs import RECORD, Job, Record, changed, finished, read_record
from experiments.harness.rates import Tuning
from experiments.harness.results import records_in, result_file, unfinished_file
from nagjax.errors import UserError
from nagjax.files import write_text
from nagjax.runs.config import nested


def recorded(homes: Sequence[Path], name: str, size: str) -> dict[str, Record]:
    """The jobs of a size that result files hold, finished sizes and unfinished ones, by name; where two hold the same,
    that of the first home counts, and in it the finished one."""
    found: dict[str, Record] = {}
    for home in reversed(homes):
        for path in (unfinished_file(home, name, size), result_file(home, name, size)):
            found |= {record.name: record for record in records_in(path)}
    return found


def reuse(homes: Sequence[Path], name: str, size: str, jobs: Sequence[Job], folder: Path) -> int:
    """Leaves the records that a size's files hold where these jobs would leave them, so that they are not done again;
    returns how many. A record that is there stays. A size of another recipe is RECIPE.SIZE.

    Raises UserError if there is no such file, if it has none of these jobs, or if one of them is of another config.
    """
    other, _, of_size = size.rpartition(".")
    path = result_file(homes[0], other or name, of_size)
    known = recorded(homes, other or name, of_size)
    if not known:
        raise UserError("reuse", size, f"there is no {path}; name a size that was run")
    every = [*jobs, *_widened(jobs, known.values())]
    found = [
        (job, dataclasses.replace(known[job.name], config=nested(known[job.name].config)))
        for job in every
        if job.name in known
    ]
    if not found:
        raise UserError("reuse", str(path), f"it holds no run of this plan; its runs are {', '.join(sorted(known))}")
    for job, record in found:
        if told := changed(record.config, job):
            raise UserError("reuse", str(path), f"{job.name} is of another experiment: {told}")
    for job, record in found:
        own = folder / job.name / RECORD
        if not own.exists():
            own.parent.mkdir(parents=True, exist_ok=True)
            write_text(own, json.dumps(dataclasses.asdict(record)))
    return sum(job.name in known for job in jobs)


def done(jobs: Sequence[Job], folder: Path) -> list[Record]:
    """The records in the folder: of these jobs, and of the rates that an unfinished tuning has tried beyond its first
    grid, which no job of the plan stands for."""
    there = [read_record(path) for path in sorted(folder.glob(f"*/{RECORD}"))]
    open_ones = [job for job in jobs if finished(job, folder) is None]
    found = [finished(job, folder) for job in [*jobs, *_widened(open_ones, there)]]
    return [record for record in found if record is not None]


def _widened(jobs: Sequence[Job], records: Iterable[Record]) -> list[Job]:
    factors = {record.labels["factor"] for record in records if "factor" in record.labels}
    tunings = [job for job in jobs if isinstance(job, Tuning)]
    return [tuning.trial(factor) for tuning in tunings for factor in sorted(factors - {*tuning.factors})]


def check_kept(home: Path, name: str, size: str, jobs: Sequence[Job]) -> None:
    """Raises UserError if the size's result file holds runs that this plan, whose result would replace it, lacks or has
    with another config; and where what is kept of it is damaged."""
    path, planned = result_file(home, name, size), {job.name: job for job in jobs}
    records_in(unfinished_file(home, name, size))
    there = records_in(path)
    gone = sorted({record.name for record in there} - planned.keys())
    if gone:
        shown = ", ".join(gone[:3]) + (f" and {len(gone) - 3} more" if len(gone) > 3 else "")
        raise UserError("results", str(path), f"it holds runs that this plan lacks, {shown}; give another --results")
    for record in there:
        if told := changed(nested(record.config), planned[record.name]):
            fix = f"its {record.name} is of another experiment: {told}; give another --results, or delete it"
            raise UserError("results", str(path), fix)
