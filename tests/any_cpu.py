"""Runs the tests under other instruction sets, thread counts and loop emitters than this machine's: `make
test-any-cpu`. Numbers differ by rounding between them, verdicts may not.

Four runs have every value of each factor and all pairs of threads and emitters; --all makes the sixteen of the product,
--quick two of the four.
XLA splits loops and products by the CPUs a process may use: a run of one thread may use one. `own` is the machine's
whole instruction set; one that the machine lacks is the widest it has.
"""

import argparse
import concurrent.futures
import itertools
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ISAS, THREADS, EMITTERS = ("SSE4_2", "AVX2", "AVX512", "own"), (1, 2), ("old", "new")
FOLDER = Path(__file__).parent
NUMERICAL = "residual layers mod model pallas_kernels contracts generate train measure report runs".split()
QUICK = (
    "residual/test_equations.py",
    "residual/test_nag_invariants.py",
    "layers/test_attention.py",
    "layers/test_mlp_and_embedding.py",
    "mod/test_selection.py",
    "mod/test_causal.py",
    "pallas_kernels/test_review_update.py",
)


class Case(NamedTuple):
    isa: str
    threads: int
    emitters: str

    def environment(self) -> dict[str, str]:
        """This process' environment, with the variables that tests/conftest.py and XLA read."""
        flags = [os.environ.get("XLA_FLAGS", "")] + ([] if self.isa == "own" else [f"--xla_cpu_max_isa={self.isa}"])
        own = {"XLA_FLAGS": " ".join(flags).strip(), "EMITTERS": self.emitters}
        return {"ONE_PER_STREAM": "1"} | os.environ | own


COVER = (Case("own", 2, "old"), Case("AVX2", 2, "new"), Case("AVX512", 1, "new"), Case("SSE4_2", 1, "old"))
BESIDE = (COVER[1], COVER[3])  # of the core: the first is how `make test` runs, the third is near it


def run(case: Case, number: int, tests: list[str]) -> bool:
    """One run of pytest; its output is shown when it has ended."""
    began, cpus = time.perf_counter(), []
    if hasattr(os, "sched_setaffinity"):
        usable = sorted(os.sched_getaffinity(0))
        cpus = [usable[(number + i) % len(usable)] for i in range(min(case.threads, len(usable)))]
    with tempfile.TemporaryFile("w+") as printed:
        code = subprocess.run(
            [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
            env=case.environment(),
            stdout=printed,
            stderr=subprocess.STDOUT,
            preexec_fn=(lambda: os.sched_setaffinity(0, cpus)) if cpus else None,
        ).returncode
        printed.seek(0)
        lines = printed.read().splitlines()
    shown = lines[-1:] if code == 0 else lines
    took = f"{time.perf_counter() - began:.0f} s"
    print(f"\n== {case.isa}, {case.threads} threads, {case.emitters} emitters ({took})", *shown, sep="\n", flush=True)
    return code == 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="what pytest is given; unless given, what computes")
    parser.add_argument("--all", action="store_true", help="the whole product")
    parser.add_argument("--quick", action="store_true", help="the core alone, two runs, a minute on two cores")
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    asked = parser.parse_args()
    tests = asked.tests or [str(FOLDER / name) for name in (QUICK if asked.quick else NUMERICAL)]
    cases = BESIDE if asked.quick else COVER
    if asked.all:
        cases = [Case(*case) for case in itertools.product(ISAS, THREADS, EMITTERS)]
    with concurrent.futures.ThreadPoolExecutor(asked.jobs) as pool:
        passed = list(pool.map(run, cases, range(len(cases)), itertools.repeat(tests)))
    failed = [" ".join(map(str, case)) for case, ok in zip(cases, passed, strict=True) if not ok]
    print(f"\n{len(cases) - len(failed)} of {len(cases)} runs passed", *failed, sep="\nfailed: ")
    return len(failed)


if __name__ == "__main__":
    sys.exit(main())
