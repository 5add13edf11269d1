"""Reuse of earlier runs: which of a plan's jobs result files already contain, and what a new file would lose."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from experiments.harness.jobs import AFTER, RECORD, Job, Record, changed, finished, read_record
from experiments.harness.rates import Tuning
from experiments.harness.results import records_in, result_file, unfinished_file
from nagjax.errors import UserError
from nagjax.files import write_text
from nagjax.runs.config import nested


def recorded(homes: Sequence[Path], name: str, size: str) -> dict[str, Record]:
    """The jobs of a size that result files, finished and unfinished, contain, by name. If two contain the same job, the
    earlier home counts, and within a home the finished file."""
    found: dict[str, Record] = {}
    for home in reversed(homes):
        for path in (unfinished_file(home, name, size), result_file(home, name, size)):
            found |= {record.name: record for record in records_in(path)}
    return found


def reuse(homes: Sequence[Path], name: str, size: str, jobs: Sequence[Job], folder: Path) -> int:
    """Copies the records in a size's files to where these jobs would leave them, so that they are not run again;
    returns how many of these jobs the files contain. Records that are already there stay. A size of another recipe is
    given as RECIPE.SIZE.

    Raises UserError if there is no such file, if it has none of these jobs, or if one of them has another config.
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
        told = changed(record.config, job)
        if other not in ("", name) and AFTER in job.config() and AFTER not in record.config:
            told = "what was measured of it is not recorded"  # before 2026-11-27; in the same recipe it is the same
        if told:
            raise UserError("reuse", str(path), f"{job.name} is of another experiment: {told}")
    for job, record in found:
        own = folder / job.name / RECORD
        if not own.exists():
            own.parent.mkdir(parents=True, exist_ok=True)
            write_text(own, json.dumps(dataclasses.asdict(record)))
    return sum(job.name in known for job in jobs)


def done(jobs: Sequence[Job], folder: Path) -> list[Record]:
    """The records in the folder: those of these jobs, and those of the rates that an unfinished tuning has tried beyond
    its first grid, which are not jobs of the plan."""
    there = [read_record(path) for path in sorted(folder.glob(f"*/{RECORD}"))]
    open_ones = [job for job in jobs if finished(job, folder) is None]
    found = [finished(job, folder) for job in [*jobs, *_widened(open_ones, there)]]
    return [record for record in found if record is not None]


def _widened(jobs: Sequence[Job], records: Iterable[Record]) -> list[Job]:
    factors = {record.labels["factor"] for record in records if "factor" in record.labels}
    tunings = [job for job in jobs if isinstance(job, Tuning)]
    return [tuning.trial(factor) for tuning in tunings for factor in sorted(factors - {*tuning.factors})]


def check_kept(home: Path, name: str, size: str, jobs: Sequence[Job]) -> None:
    """Raises UserError if the size's result file, which this plan's result would replace, contains runs that the plan
    lacks or has with another config, and where `check_unfinished` does."""
    path, planned = result_file(home, name, size), {job.name: job for job in jobs}
    check_unfinished(home, name, size, jobs)
    there = records_in(path)
    gone = sorted({record.name for record in there} - planned.keys())
    if gone:
        shown = ", ".join(gone[:3]) + (f" and {len(gone) - 3} more" if len(gone) > 3 else "")
        raise UserError("results", str(path), f"it holds runs that this plan lacks, {shown}; give another --results")
    _check_same(path, there, planned)


def check_unfinished(home: Path, name: str, size: str, jobs: Sequence[Job]) -> None:
    """Raises UserError if the file of the size's unfinished runs, in which this plan's would replace those of the same
    names, has one of them with another config, and if it is damaged."""
    path = unfinished_file(home, name, size)
    there = records_in(path)
    planned = {job.name: job for job in [*jobs, *_widened(jobs, there)]}
    _check_same(path, [record for record in there if record.name in planned], planned)


def _check_same(path: Path, records: Iterable[Record], planned: Mapping[str, Job]) -> None:
    for record in records:
        if told := changed(nested(record.config), planned[record.name]):
            fix = f"its {record.name} is of another experiment: {told}; give another --results, or delete it"
            raise UserError("results", str(path), fix)
