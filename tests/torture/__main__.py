"""Kills and faults by the hundred: `python -m tests.torture --faults 200 --seed 0`.

Trains tiny models with the real command, `nagjax train`, in forks of a process that has imported it but used nothing,
so that a start costs seconds. Each configuration is trained once in peace, then again and again under faults; whatever
happened, the same command must end with the same metrics file and the same state, bit for bit.
"""

import argparse
import json
import os
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict
from pathlib import Path

OF_TWO = 0.1
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_NUM_CPU_DEVICES": "1",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="torture", description=__doc__)
    parser.add_argument("--faults", type=int, default=200, help="how many are injected at least")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2, help="processes that each work through some configurations")
    parser.add_argument("--variants", type=int, default=None, help="only so many configurations")
    parser.add_argument("--minutes", type=float, default=None, help="begin no configuration after so long")
    parser.add_argument("--add", action="store_true", help="to what --out holds already: made in pieces, by seed")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results/torture.json"))
    parser.add_argument("--docs", type=Path, default=None, help="write the table of faults there")
    parser.add_argument("--worker", nargs=2, default=None, help=argparse.SUPPRESS)  # share, scratch folder
    args = parser.parse_args()
    os.environ.update(ENVIRONMENT)
    return work(args) if args.worker else lead(args)


def lead(args) -> int:
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="torture-") as scratch:
        scratch = Path(scratch)
        make_corpus(scratch)
        command = [sys.executable, "-m", "tests.torture", "--seed", str(args.seed), "--faults", str(args.faults)]
        command += ["--variants", str(args.variants)] if args.variants else []
        command += ["--jobs", str(args.jobs)]
        command += ["--minutes", str(args.minutes)] if args.minutes else []
        workers = [
            subprocess.Popen([*command, "--worker", str(share), str(scratch)], env=os.environ)
            for share in range(args.jobs)
        ]
        codes = [worker.wait() for worker in workers]
        if any(codes):
            return 1
        tallies = [json.loads(path.read_text()) for path in sorted(scratch.glob("tally-*.json"))]
    result = summary(args, tallies, time.monotonic() - began)
    if args.add and args.out.exists():
        result = added(json.loads(args.out.read_text()), result)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    if args.docs:
        from tests.torture.report import page

        args.docs.write_text(page(result))
    total = sum(result["injected"].values())
    print(f"{total} faults in {result['seconds']:.0f} s, {len(result['problems'])} problems: {args.out}")
    for problem in result["problems"]:
        print(problem, file=sys.stderr)
    return 1 if result["problems"] else 0


def make_corpus(scratch: Path) -> None:
    from nagjax.data import prepare

    text = scratch / "text"
    text.mkdir()
    for i in range(30):
        line = "the quick brown fox jumps over the lazy dog. "
        (text / f"{i}.txt").write_text(f"document {i}: " + line * (3 + i % 5))
    prepare([str(text)], scratch / "corpus", validation=0.3)


def variants() -> list:
    """Every scheme, with and without Mixture-of-Depths, on one host and on two; and on one bad batches under the two
    policies that go on."""
    from nagjax.residual.registry import schemes
    from tests.torture.history import Variant

    found = [
        Variant("nag, bad batches skipped", ("--scheme", "nag", "--on-bad-step", "skip"), (6, 7, 21)),
        Variant("nag, bad batches rolled back", ("--scheme", "nag", "--on-bad-step", "rollback"), (6, 7, 21)),
    ]
    for name in schemes():
        for title, options in ((name, ()), (f"{name} + MoD", ("--mod.rate", "0.5"))):
            options = ("--scheme", name, *options)
            found.append(Variant(title, options))
            found.append(Variant(f"{title}, two hosts", (*options, "--mesh.fsdp", "2"), hosts=2))
    return found


def work(args) -> int:
    share, scratch = int(args.worker[0]), Path(args.worker[1])
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(scratch / f"programs-{share}")
    import logging

    import grain  # noqa: F401 - what the forks need is imported once

    import nagjax.commands.train
    import nagjax.train.loop  # noqa: F401
    from tests.torture.history import History
    from tests.torture.hosts import TwoHosts

    logging.disable(logging.WARNING)
    began = time.monotonic()
    for i, (variant, kinds) in enumerate(faults_of_each(args)):
        if i % args.jobs != share or (args.minutes and time.monotonic() - began > 60 * args.minutes):
            continue
        folder = scratch / f"variant-{i}"
        folder.mkdir()
        history = (History, TwoHosts)[variant.hosts - 1](variant, scratch / "corpus", folder, args.seed)
        tally = history.play(kinds)
        (scratch / f"tally-{i:03d}.json").write_text(json.dumps({"variant": variant.name, **asdict(tally)}))
        print(f"{variant.name}: {sum(tally.injected.values())} faults, {len(tally.problems)} problems", flush=True)
    return 0


def faults_of_each(args) -> list[tuple]:
    """The configurations, each with the kinds of its faults; `OF_TWO` of all faults are of two hosts."""
    from tests.torture import faults

    both, found, all_variants = int(OF_TWO * args.faults), [], variants()
    for hosts, count in ((2, both), (1, args.faults - both)):
        chosen = [variant for variant in all_variants if variant.hosts == hosts]
        random.Random(args.seed).shuffle(chosen)
        chosen, kinds = chosen[: args.variants], faults.draw(random.Random(args.seed), count, hosts)
        for i, variant in enumerate(chosen):
            mine = kinds[i :: len(chosen)]
            if variant.poison:  # there a NaN does not end the command
                mine = ["kill in a step" if kind == "NaN in a batch, once" else kind for kind in mine]
            if mine:
                found.append((variant, mine))
    random.Random(args.seed).shuffle(found)  # of both, whenever it is cut short
    return found


def summary(args, tallies: list[dict], seconds: float) -> dict:
    from pallas_kernels.origin import commit, versions

    injected: dict[str, int] = {}
    for tally in tallies:
        for kind, count in tally["injected"].items():
            injected[kind] = injected.get(kind, 0) + count
    packages = ("nagjax", "jax", "orbax-checkpoint", "grain")
    return {
        "seed": args.seed,
        "seconds": round(seconds, 1),
        "processes": sum(tally["processes"] for tally in tallies),
        "runs_finished": sum(tally["finished"] for tally in tallies),
        "longest_stop_seconds": round(max(tally["grace"] for tally in tallies), 2),
        "injected": injected,
        "problems": [problem for tally in tallies for problem in tally["problems"]],
        "variants": {tally["variant"]: sum(tally["injected"].values()) for tally in tallies},
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "versions": versions(packages),
        "commit": commit(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }


def added(old: dict, new: dict) -> dict:
    """Two results as one."""
    both = dict(new)
    for name in ("injected", "variants"):
        both[name] = {key: old[name].get(key, 0) + new[name].get(key, 0) for key in {**old[name], **new[name]}}
    for name in ("seconds", "processes", "runs_finished", "problems"):
        both[name] = old[name] + new[name]
    for name in ("seed", "commit", "date"):  # of each
        seen = [*str(old[name]).split(" and "), str(new[name])]
        both[name] = " and ".join(dict.fromkeys(seen))
    both["longest_stop_seconds"] = max(old["longest_stop_seconds"], new["longest_stop_seconds"])
    return both


if __name__ == "__main__":
    sys.exit(main())
