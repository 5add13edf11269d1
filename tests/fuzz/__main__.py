"""`python tests/fuzz --mutations 2000 --seed 0`: damages every file that a verb reads, and runs the verb."""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(prog="fuzz", description=__doc__)
    parser.add_argument("--mutations", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--docs", type=Path, default=None, help="write the table there")
    parser.add_argument("--only", default="", help="targets whose name has this in it")
    args = parser.parse_args()
    os.environ.update({"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"})
    sys.path[:0] = [str(HERE.parents[1]), str(HERE)]
    from fuzz_walk import page, table, walk
    from fuzz_world import build

    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="fuzz-") as scratch:
        targets = [t for t in build(Path(scratch) / "world", trained=True) if args.only in t.name]
        found = walk(targets, args.mutations, args.seed, Path(scratch), tell=lambda text: print(text, flush=True))
    seconds = time.monotonic() - began
    print(table(found))
    if args.docs:
        args.docs.write_text(page(found, args.seed, seconds))
    failures = [failure for one in found.values() for failure in one.failures]
    print(f"{args.mutations} mutations in {seconds:.0f} s, {len(failures)} failures")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
