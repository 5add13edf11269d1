"""Compile all kernels for all targets, print the table and all problems; exit with 1 if there are any."""

import argparse
import json
import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax

from pallas_kernels.aot.cases import Case, cases, quickest
from pallas_kernels.aot.report import facts, inserted, markdown, outdated
from pallas_kernels.aot.runner import SECONDS_PER_COMPILE, run
from pallas_kernels.aot.targets import TARGETS, Target, missing
from pallas_kernels.ops import all_ops

SLOWEST = 5  # programs that are listed


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.aot", description=__doc__)
    parser.add_argument("--target", action="append", choices=TARGETS, help="default: all of them")
    parser.add_argument("--op", action="append", choices=sorted(all_ops()), help="only this op; may be repeated")
    parser.add_argument(
        "--quick", action="store_true", help="one shape of the tables and one edge, a third of the time"
    )
    parser.add_argument("--seconds", type=float, default=SECONDS_PER_COMPILE, help="limit per compilation")
    parser.add_argument(
        "--step",
        action="append",
        default=[],
        metavar="MODULE:FUNCTION",
        help="another step to compile: function(devices, implementation) -> (step, arguments, mesh)",
    )
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--readme", type=Path, help="rewrite the tables of this page")
    parser.add_argument("--check", type=Path, help="a problem where this page's tables have other figures")
    options = parser.parse_args(arguments)
    for page in filter(None, (options.readme, options.check)):
        inserted(page.read_text(), {})  # a page without marks is refused before an hour of compiling
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
    jax.config.update("jax_platforms", "cpu")  # the workers have the compilers

    def everything(target: Target) -> dict[tuple[str, Case], dict]:
        listed = quickest(cases(target)) if options.quick else cases(target)
        wanted = [c for c in listed if not options.op or c.op in options.op]
        if target.platform != "rocm":  # no XLA for AMD
            wanted += [Case(step, "best", "step") for step in options.step]
        start, found, took = time.perf_counter(), {}, {}
        for case, result in run(target, wanted, seconds=options.seconds):
            found[target.name, case] = result
            took[case.label] = time.perf_counter() - start - sum(took.values())
            for problem in result["problems"]:
                print(f"{target.name}: {case.label}: {problem}", flush=True)
        slowest = ", ".join(f"{own} {took[own]:.0f} s" for own in sorted(took, key=took.get, reverse=True)[:SLOWEST])
        print(f"{target.name}: {len(wanted)} programs in {sum(took.values()):.0f} s; longest: {slowest}", flush=True)
        return found

    chosen = [TARGETS[name] for name in options.target or TARGETS]
    for target in chosen:
        if reason := missing(target):
            print(f"{target.name}: skipped, {reason}")
    compiled = [target for target in chosen if not missing(target)]
    with ThreadPoolExecutor(os.cpu_count()) as pool:  # one thread per target, each with its own process
        results = {key: r for found in pool.map(everything, compiled) for key, r in found.items()}
    print("\n" + markdown(results) + "\n\n" + facts(results))
    if options.readme:
        options.readme.write_text(inserted(options.readme.read_text(), results))
    stale = outdated(options.check.read_text(), results) if options.check else []
    if stale:
        print("\n".join([f"{options.check} has other figures (write them with --readme):", *stale]))
    if options.json:
        records = [{"target": t, "case": c.label} | r for (t, c), r in results.items()]
        options.json.write_text(json.dumps(records, indent=1) + "\n")
    if not compiled:
        print("nothing could be compiled")
    return int(not compiled or bool(stale) or any(r["problems"] for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
