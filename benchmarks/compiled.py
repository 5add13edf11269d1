"""Figures of compiled programs, one case at a time. Cases that a result file lacks are compiled, each in its own
process, and then the tables of the pages are rewritten."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import jax

from benchmarks import plan_tables as tables
from pallas_kernels.aot.targets import compilers_environment
from pallas_kernels.origin import commit, now

ROOT = Path(__file__).parents[1]
MINUTES = 20  # for one case


def results_of(name: str) -> Path:
    return ROOT / "benchmarks" / "results" / f"{name}.json"


def main(
    name: str,
    cases: Sequence[tuple[str, ...]],
    measured: Callable[..., dict],
    pages: Mapping[Path, Callable[[list[dict]], Mapping[str, str]]],
) -> None:
    """The command line of the benchmark `benchmarks.NAME`. `measured(*case)` returns the figures of a case, which go to
    results/NAME.json. Each page has a function of all results that returns, by name, the text between each pair of the
    page's marks."""
    parser = argparse.ArgumentParser(description=sys.modules["__main__"].__doc__)
    parser.add_argument("--fresh", action="store_true", help="compile everything again")
    parser.add_argument("--case", nargs=len(cases[0]), help="print the figures of this one")
    arguments = parser.parse_args()
    if arguments.case:
        print(json.dumps(measured(*arguments.case)))
        return
    path = results_of(name)
    results = [] if arguments.fresh or not path.exists() else json.loads(path.read_text())
    known = {tuple(one["case"]): one for one in results if tuple(one["case"]) in cases}
    for case in (case for case in cases if case not in known):
        command = [sys.executable, "-m", f"benchmarks.{name}", "--case", *case]
        own = dict(capture_output=True, text=True, timeout=60 * MINUTES, cwd=ROOT)
        done = subprocess.run(command, env=compilers_environment(), **own)
        if done.returncode:
            sys.exit(done.stderr[-2000:])
        figures = json.loads(done.stdout.splitlines()[-1])
        made = {"jax": jax.__version__, "commit": commit(), "date": now()}
        known[case] = {"case": list(case), **figures, **made}
        print(*case, flush=True)
        path.write_text(json.dumps(_in_order(known, cases), indent=1) + "\n")
    for page, texts in pages.items():
        page.write_text(tables.inserted(page.read_text(), texts(_in_order(known, cases))))


def _in_order(known: Mapping[tuple[str, ...], dict], cases: Sequence[tuple[str, ...]]) -> list[dict]:
    return [known[case] for case in cases if case in known]
