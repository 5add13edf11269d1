"""The command of every recipe: `python -m experiments.NAME --size SIZE`."""

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.harness.jobs import Record
from experiments.harness.pages import write_pages
from experiments.harness.recipe import HOME, Recipe, judged, load, names, planned
from experiments.harness.results import Summary, write_plot, write_result, write_unfinished
from experiments.harness.reuse import check_kept, check_unfinished, done, reuse
from experiments.harness.sweep import collect, work, work_in_processes
from nagjax.arguments import help_text, options_of
from nagjax.arguments import parse as read
from nagjax.errors import UserError
from nagjax.memory import keep_freed_memory
from nagjax.options import taken
from nagjax.sweep import taken as taken_by_shard

SMOKE, DEFAULT = "smoke", "cpu"
TEXTS = {  # help texts of settings that many recipes have
    "depth": "blocks",
    "depths": "blocks",
    "width": "of the residual stream",
    "context": "tokens of a sequence",
    "batch": "sequences per step",
    "steps": "of training",
    "seeds": "runs of each kind, each from other initial values and in another order of the data",
    "schemes": "residual schemes, by name",
    "eval_batches": "of held-out text, for each loss",
    "test_batches": "of fresh examples, for each score",
}


@dataclasses.dataclass(frozen=True)
class Options:
    """How a recipe is run; what it runs are its settings."""

    size: str = DEFAULT  # sets the recipe's own options below
    out: Path | None = None  # folder of the jobs; the same command in the same folder resumes; None: runs/NAME-SIZE
    results: Path | None = None  # results/ and plots/ go here; None: experiments/, for a smoke run the out folder
    reuse: tuple[str, ...] = ()  # sizes, or RECIPE.SIZE, whose result files hold runs of this plan: not done again
    keep: bool = False  # only writes the finished jobs to unfinished/, for --reuse where their folder is gone
    processes: int = 1  # on this machine, sharing its cores
    shard: str = "0/1"  # i/n: only every n-th job from the i-th on, for array launchers; start again to collect


def main(file: str, arguments: Sequence[str] | None = None) -> None:
    """Runs the recipe in `file` with the command line's arguments; exits with 2 and one line for bad input."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    keep_freed_memory()
    try:
        recipe = load(Path(file).stem)
        options, settings = parse(recipe, arguments)
        run(recipe, options, settings, f"python -m experiments.{recipe.name} {shlex.join(told(arguments))}".strip())
    except UserError as error:
        print(f"experiments: error: {error}", file=sys.stderr)
        sys.exit(2)
    except OSError as error:  # a full disk, or a file in place of a folder
        if error.filename is None:
            raise
        print(f"experiments: error: {error.filename}: {error.strerror}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on", file=sys.stderr)
        sys.exit(130)


def told(arguments: Sequence[str]) -> list[str]:
    """The arguments that a result file records: all except those that say where files go on this machine."""
    private = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    private.add_argument("--out")
    private.add_argument("--results")
    return private.parse_known_args(list(arguments))[1]


def parse(recipe: Recipe, arguments: Sequence[str]) -> tuple[Options, Any]:
    """The options, and the settings of the size with the changes from the command line."""
    settings = recipe.settings(taken("--size", arguments, DEFAULT))
    prog, parts = f"python -m experiments.{recipe.name}", (Options(), settings)
    known = [
        [
            dataclasses.replace(
                option, default=getattr(part, option.name), text=option.text or TEXTS.get(option.name, "")
            )
            for option in options_of(type(part))
        ]
        for part in parts
    ]
    if {"-h", "--help", "--help-all"} & {*arguments}:
        text = "\n\n".join(f"{field}: {value}" for field, value in recipe.header.items())
        print(help_text(prog, text, [option for own in known for option in own]))
        sys.exit(0)
    given = read([option for own in known for option in own], arguments, prog)
    options, settings = (
        dataclasses.replace(part, **{option.name: given[option.name] for option in own if option.name in given})
        for part, own in zip(parts, known, strict=True)
    )
    return options, settings


def run(recipe: Recipe, options: Options, settings: Any, command: str) -> Summary | None:
    """Runs the jobs, and once all are finished writes and prints the result; None while some are missing."""
    out = options.out or Path("runs") / f"{recipe.name}-{options.size}"
    own = taken_by_shard(options.shard)
    if options.processes < 1:
        raise UserError("processes", options.processes, "give a number of at least 1")
    jobs = planned(recipe, settings)
    home = options.results or (out if options.size == SMOKE else HOME)
    for folder in (out, home):  # needed at the end, so checked before anything is trained
        folder.mkdir(parents=True, exist_ok=True)
    if home == HOME:
        for name in names():
            load(name)
    for size in options.reuse:
        count = reuse((home, HOME), recipe.name, size, jobs, out)
        print(f"{count} of {len(jobs)} jobs are those of size {size}")
    if options.keep:
        check_unfinished(home, recipe.name, options.size, jobs)
        return _keep(recipe, options, settings, command, home, out, done(jobs, out))
    check_kept(home, recipe.name, options.size, jobs)
    if options.processes == 1:
        work(jobs[own], out)
    elif own.step > 1:
        raise UserError("processes", options.processes, "with --shard every task is one process")
    else:
        work_in_processes(recipe, settings, out, options.processes)
    records = collect(jobs, out)
    if records is None:
        again = "the same command" + (" without --shard" if own.step > 1 else "")
        print(f"other jobs are not finished; {again} collects them ({out})")
        return None
    records, floors = _apart(records)
    summary = judged(recipe, settings, records, floors)
    path = write_result(home, recipe.name, options.size, command, settings, records, summary, floors)
    plot = write_plot(home, recipe.name, options.size, recipe.draw, settings, records)
    if home == HOME:
        write_pages()
    show(recipe, summary)
    print(f"result: {path}\nplot:   {plot}")
    return summary


def _keep(
    recipe: Recipe, options: Options, settings: Any, command: str, home: Path, out: Path, records: Sequence[Record]
) -> None:
    if not records:
        raise UserError("keep", str(out), "no job is finished there: run it without --keep first")
    path = write_unfinished(home, recipe.name, options.size, command, settings, *_apart(records))
    print(f"{len(records)} finished jobs: {path}")


def _apart(records: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The records of runs, and those of the n-gram floors under their losses."""
    return tuple([record for record in records if ("floor" in record.labels) == floors] for floors in (False, True))


def show(recipe: Recipe, summary: Summary) -> None:
    """Prints the table, the measured values, and the verdict."""
    rows = [[f"{v:.5g}" if isinstance(v, float) else str(v) for v in row.values()] for row in summary.table]
    rows = [list(summary.table[0]), *rows] if rows else []
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)))
    print(f"claim:    {recipe.header['claim']}\nexpected: {recipe.header['expected']}")
    print(f"measured: {summary.measured}")
    print(f"verdict:  {summary.verdict}{f' ({"; ".join(summary.reasons)})' if summary.reasons else ''}")
