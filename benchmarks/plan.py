"""Plans of the standard models on the standard machines: `python -m benchmarks.plan` (or `make plans`).

Compiles what benchmarks/results/plan.json does not hold yet, then writes the tables of docs/plan.md and docs/tpu_vms.md
from it.
"""

from benchmarks import plan_tables as tables
from benchmarks.compiled import MINUTES, ROOT, main
from nagjax.options import read_options
from nagjax.plan.bill import bill
from nagjax.plan.compile import bounds, plan
from nagjax.plan.order import filled
from nagjax.plan.report import report
from nagjax.plan.topology import parse

VOCAB = 32768
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
CASES = list(dict.fromkeys([(*pair, "block") for pair in STANDARD] + REMAT))


def measured(preset: str, topology_name: str, remat: str) -> dict:
    topology = parse(topology_name)
    config = read_options({"preset": preset, "remat": remat}).config()
    config = filled(config, topology, VOCAB, batch_given=False, mesh_given=False)
    return {"label": preset} | plan(config, topology, seconds=60 * MINUTES)


def quoted(result: dict) -> str:
    """The command that prints the bill of a training, and the end of its output."""
    preset, _, remat = ASKED
    command = f"nagjax plan --preset {preset} --topology {TYPE} --remat {remat}"
    command += f" --tokens {TOKENS:.0e}".replace("e+0", "e") + f" --dollars-per-hour {DOLLARS_PER_HOUR:g}"
    found = result | bounds(result, parse(TYPE), result["tokens_per_step"], DOLLARS_PER_HOUR)
    lines = report(found | {"bill": bill(found, TOKENS)}).splitlines()
    end = next(i for i, line in enumerate(lines) if line.startswith("a training of"))
    return "\n".join(["```text", f"$ {command}", "...", *lines[end:], "```"])


def of_plans(results: list[dict]) -> dict[str, str]:
    return {"standard": tables.standard(_standard(results)), "remat": tables.remat(_of(results, REMAT))}


def of_bills(results: list[dict]) -> dict[str, str]:
    rented = [one for one in _standard(results) if parse(one["topology"]).chip.platform == "tpu"]
    (asked,) = _of(results, [ASKED])
    return {"bill": tables.bills(rented, TOKENS_PER_PARAMETER), "cost": quoted(asked)}


def _standard(results: list[dict]) -> list[dict]:
    return _of(results, [(*pair, "block") for pair in STANDARD])


def _of(results: list[dict], cases: list[tuple[str, str, str]]) -> list[dict]:
    by_case = {tuple(one["case"]): one for one in results}
    return [by_case[case] for case in cases]


PAGES = {ROOT / "docs" / "plan.md": of_plans, ROOT / "docs" / "tpu_vms.md": of_bills}


if __name__ == "__main__":
    main("plan", CASES, measured, PAGES)
