"""The training step on this CPU beside PyTorch's: `make bench-torch`.

All steps of one size take turns in one sitting, so that what else the machine does meets all of them. A ratio is the
median over rounds of that round's two times. PyTorch runs in an environment of its own (benchmarks/torch_step.py).
benchmarks/results/step_cpu.json keeps the last sitting of every CPU, and the tables of docs/cpu.md are written from it.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

from benchmarks import plan_tables as tables
from benchmarks.peer import Peer
from benchmarks.sittings import kept, machine
from nagjax.files import check_writable_file
from nagjax.measure.profile import OTHER, SCOPES, profile
from nagjax.measure.step_times import Racer, blueprint_of, race
from nagjax.memory import keep_freed_memory
from nagjax.processes import cores
from pallas_kernels.origin import origin

ROOT = Path(__file__).parents[1]
RESULTS, PAGE = ROOT / "benchmarks" / "results" / "step_cpu.json", ROOT / "docs" / "cpu.md"
SCHEMES = ("plain", "nag", "review")
FIRST = "plain"
TORCH = ("eager", "compiled")
PARTS = tuple(part for part in (*SCOPES, OTHER) if part != "routing")  # of a dense step


class Torch(Peer):
    """PyTorch's step at the same sizes."""

    def __init__(self, python: str, blueprint, batch: int, compiled: bool):
        model = blueprint.config.model
        sizes = {name: getattr(model, name) for name in ("depth", "width", "context", "vocab", "heads", "hidden")}
        options = [f"--{name}={value}" for name, value in {**sizes, "batch": batch, "threads": cores()}.items()]
        super().__init__(python, "torch_step.py", *options, *["--compiled"] * compiled)

    def seconds(self, steps: int) -> float:
        return float(self.ask(steps))


def measure(depth: int, width: int, batch: int, context: int, rounds: int, python: str | None) -> dict:
    """The figures of one size: milliseconds, ratios to the plain scheme, and the share of each part."""
    blueprints = {name: blueprint_of(name, depth, width, batch, context) for name in SCHEMES}
    racers = {name: Racer(blueprint, batch, context) for name, blueprint in blueprints.items()}
    peers = {}
    if python:
        peers = {f"torch_{how}": Torch(python, blueprints[FIRST], batch, how == "compiled") for how in TORCH}
    everyone = racers | peers
    times = race(everyone, rounds, steps=1)
    for peer in peers.values():
        peer.end()
    rows = {
        name: {
            "milliseconds": 1e3 * statistics.median(own),
            "least_milliseconds": 1e3 * min(own),
            "ratio_to_plain": statistics.median(a / b for a, b in zip(own, times[FIRST], strict=True)),
            "least_ratio_to_plain": min(own) / min(times[FIRST]),
        }
        for name, own in times.items()
    }
    with tempfile.TemporaryDirectory() as folder:
        parts = profile(blueprints[FIRST].config, Path(folder), 5)["scopes"]
    shares = {name: own / sum(parts.values()) for name, own in parts.items()}
    versions = {peer.about["version"] for peer in peers.values()}
    return {"depth": depth, "width": width, "results": rows, "shares_of_plain": shares, "torch": sorted(versions)}


def texts(sittings: list[dict]) -> dict[str, str]:
    """The tables of docs/cpu.md: times as multiples of plain's, and the shares of plain's parts."""
    names = ("nag", "review", *(f"torch_{how}" for how in TORCH))
    ratios, shares = [], []
    for sitting in sittings:
        for size in sitting["sizes"]:
            what, found = (sitting["cpu"], f"{size['depth']} x {size['width']}"), size["results"]
            told = [f"{found[name]['ratio_to_plain']:.2f}" if name in found else "-" for name in names]
            ratios.append((*what, f"1 ({found[FIRST]['milliseconds']:,.0f} ms)", *told, sitting["date"][:10]))
            shares.append((*what, *(f"{size['shares_of_plain'].get(part, 0):.0%}" for part in PARTS)))
    head = ("CPU", "model", "plain", "NAG", "Review", "PyTorch eager", "PyTorch compiled", "measured")
    return {"steps": tables.table(head, ratios), "shares": tables.table(("CPU", "model", *PARTS), shares)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", help="Python of PyTorch's environment; without it nagjax is timed alone")
    parser.add_argument("--sizes", nargs="+", default=["24x64", "24x256"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    check_writable_file(options.out)
    keep_freed_memory()
    before = machine()
    batch, context = 8, 128
    sizes = []
    for size in options.sizes:
        depth, width = map(int, size.split("x"))
        sizes.append(measure(depth, width, batch, context, options.rounds, options.torch))
        for name, row in sizes[-1]["results"].items():
            print(f"{size} {name:15} {row['milliseconds']:9.1f} ms  {row['ratio_to_plain']:.3f} x plain", flush=True)
    result = {"bench": "step", "batch": batch, "context": context, "rounds": options.rounds, "sizes": sizes}
    sittings = kept(options.out, result | before | origin())
    if options.out == RESULTS:
        PAGE.write_text(tables.inserted(PAGE.read_text(), texts(sittings)))


if __name__ == "__main__":
    main()
