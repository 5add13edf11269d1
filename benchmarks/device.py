"""Everything there is to measure on an accelerator, as one command in parts of at most nine minutes.

    python benchmarks/device.py --part values --out FOLDER [--minutes 9]

Parts, in the order in which they matter: values, kernels, steps, attention, experts, mod, training, profile; `all`
takes them in turn for as long as the time lasts. A part writes FOLDER/PART.jsonl row by row: a part that is killed
loses the case it was at, and the same command goes on behind it. `--rehearse` takes shapes that a CPU finishes in
seconds, and writes into FOLDER/rehearsal. benchmarks/README.md says how to run it on a machine that has little more
than jax.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # the peers share the device


def parts() -> dict[str, Callable]:
    """Each part's generator of cases, by name."""
    from benchmarks.parts import attention, experts, kernels, profile, steps, training, values

    return {
        "values": values.cases,
        "kernels": kernels.cases,
        "steps": steps.cases,
        "attention": attention.cases,
        "experts": experts.cases,
        "mod": steps.routed_cases,
        "training": training.cases,
        "profile": profile.cases,
    }


def main(argv: list[str] | None = None) -> int:
    """The number of cases that are left."""
    known = parts()
    parser = argparse.ArgumentParser(prog="python benchmarks/device.py", description=__doc__.split("\n")[0])
    parser.add_argument("--part", action="append", choices=[*known, "all"], required=True, help="may be repeated")
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--minutes", type=float, default=9.0, help="no case is begun that would end later")
    parser.add_argument("--scratch", type=Path, help="for unfinished runs and traces; OUT/scratch unless given")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, to see that everything runs")
    given = parser.parse_args(argv)

    from benchmarks.parts.rows import REHEARSAL, Options, Rows

    deadline = time.monotonic() + 60 * given.minutes
    out = given.out / REHEARSAL if given.rehearse else given.out
    scratch = given.scratch or out / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    options, left = Options(given.rehearse, scratch, deadline), 0
    for part in known if "all" in given.part else given.part:
        unfinished = Rows(part, out, deadline).run(known[part](options))
        print(f"{part}: {'finished' if not unfinished else f'{unfinished} cases left'}", flush=True)
        left += unfinished
    return left


if __name__ == "__main__":
    main()
