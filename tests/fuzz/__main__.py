"""`python -m tests.fuzz --mutations 2000 --seed 0`: damages every file that a verb reads, and runs the verb."""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes that share the mutations")
    parser.add_argument("--docs", type=Path, default=None, help="write the table there")
    parser.add_argument("--only", default="", help="targets whose name has this in it")
    parser.add_argument("--worker", nargs=2, default=None, help=argparse.SUPPRESS)  # share, scratch folder
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    return work(args) if args.worker else lead(args)


def work(args) -> int:
    from tests.fuzz.walk import walk
    from tests.fuzz.world import build

    share, scratch = int(args.worker[0]), Path(args.worker[1])
    targets = [t for t in build(scratch / f"world-{share}", trained=True) if args.only in t.name]
    numbers = range(share, args.mutations, args.jobs)
    found = walk(targets, numbers, args.seed, scratch / str(share), tell=lambda text: print(text, flush=True))
    rows = [(*kind, vars(outcome)) for kind, outcome in found.items()]
    (scratch / f"found-{share}.json").write_text(json.dumps(rows))
    return 0


def lead(args) -> int:
    from tests.fuzz.walk import Outcome, page, table

    began, command = time.monotonic(), [sys.executable, "-m", "tests.fuzz", "--only", args.only]
    command += ["--jobs", str(args.jobs), "--mutations", str(args.mutations), "--seed", str(args.seed)]
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        workers = [subprocess.Popen([*command, "--worker", str(share), scratch]) for share in range(args.jobs)]
        if any([worker.wait() for worker in workers]):
            return 1
        found: dict[tuple[str, str], Outcome] = {}
        for path in sorted(Path(scratch).glob("found-*.json")):
            for target, name, row in json.loads(path.read_text()):
                found.setdefault((target, name), Outcome()).add(Outcome(**row))
    seconds = time.monotonic() - began
    print(table(found))
    if args.docs:
        args.docs.write_text(page(found, args.seed, seconds))
    failures = [failure for one in found.values() for failure in one.failures]
    print(f"{args.mutations} mutations in {seconds:.0f} s, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
