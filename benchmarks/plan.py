"""Plans of the standard models on the standard machines: `python -m benchmarks.plan` (or `make plans`).

Compiles what benchmarks/results/plan.json does not hold yet, then writes the tables of docs/plan.md and docs/tpu_vms.md
from it.
"""

import argparse
import json
from pathlib import Path

from benchmarks import plan_tables as tables
from nagjax.errors import UserError
from nagjax.options import read_options
from nagjax.plan.bill import bill
from nagjax.plan.compile import bounds, plan
from nagjax.plan.order import filled
from nagjax.plan.report import report
from nagjax.plan.topology import parse

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results" / "plan.json", ROOT / "docs"
MINUTES, VOCAB = 20, 32768
TOKENS_PER_PARAMETER = 20  # Hoffmann et al. 2022, arXiv:2203.15556

STANDARD = [
    ("150M", "v5e:2x2"),
    ("150M", "v5e:4x4"),
    ("350M", "v5e:4x4"),
    ("350M", "h200x8"),
    ("1B", "v5e:4x4"),
    ("1B", "v6e:2x4"),
    ("1B", "v5p:2x2x2"),
    ("1B", "h200x8"),
    ("3B", "v5e:8x8"),
    ("3B", "v6e:4x8"),
    ("3B", "v5p:2x4x4"),
    ("7B", "v5e:16x16"),
    ("7B", "v6e:8x8"),
    ("7B", "v5p:8x8x4"),
]
REMAT = [("1B", "v5p:2x2x2", policy) for policy in ("none", "dots", "block", "offload")]
ASKED, TYPE = ("150M", "v5e:4x4", "block"), "v5e-16"  # plan whose bill is quoted, its name at Google Cloud
TOKENS, DOLLARS_PER_HOUR = 3e9, 1.2  # of the quoted bill; the price is an example
ORDERS = list(dict.fromkeys([(*pair, "block") for pair in STANDARD] + REMAT))


def one(preset: str, topology_name: str, remat: str) -> dict:
    topology = parse(topology_name)
    config = read_options({"preset": preset, "remat": remat}).config()
    config = filled(config, topology, VOCAB, batch_given=False, mesh_given=False)
    return {"label": preset} | plan(config, topology, seconds=60 * MINUTES)


def key(result: dict) -> tuple[str, str, str]:
    return result["label"], result["topology"], result["config"]["model"]["remat"]


def quoted(result: dict) -> str:
    """The command that prints the bill of a training, and the end of its output."""
    preset, _, remat = ASKED
    command = f"nagjax plan --preset {preset} --topology {TYPE} --remat {remat}"
    command += f" --tokens {TOKENS:.0e}".replace("e+0", "e") + f" --dollars-per-hour {DOLLARS_PER_HOUR:g}"
    found = result | bounds(result, parse(TYPE), result["tokens_per_step"], DOLLARS_PER_HOUR)
    lines = report(found | {"bill": bill(found, TOKENS)}).splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("a training of"))
    return "\n".join(["```text", f"$ {command}", "...", *lines[end:], "```"])


def write_tables(results: list[dict]) -> None:
    by_key = {key(result): result for result in results}
    standard = [by_key[*pair, "block"] for pair in STANDARD if (*pair, "block") in by_key]
    rented = [result for result in standard if parse(result["topology"]).chip.platform == "tpu"]
    found = {
        "plan.md": {
            "standard": tables.standard(standard),
            "remat": tables.remat(by_key[order] for order in REMAT if order in by_key),
        },
        "tpu_vms.md": {"bill": tables.bills(rented, TOKENS_PER_PARAMETER)},
    }
    if ASKED in by_key:
        found["tpu_vms.md"]["cost"] = quoted(by_key[ASKED])
    for page, texts in found.items():
        path = DOCS / page
        path.write_text(tables.inserted(path.read_text(), texts))


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--fresh", action="store_true", help="compile everything again")
    known = [] if arguments.parse_args().fresh or not RESULTS.exists() else json.loads(RESULTS.read_text())
    results = [result for result in known if key(result) in ORDERS]
    for order in ORDERS:
        if order in map(key, results):
            continue
        try:
            results.append(one(*order))
        except UserError as error:
            print(*order, error, flush=True)
            continue
        print(*order, "fits" if results[-1]["fits"] else "does not fit", flush=True)
        results.sort(key=lambda result: ORDERS.index(key(result)))
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")
    write_tables(results)


if __name__ == "__main__":
    main()
