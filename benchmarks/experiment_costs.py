"""What the experiments would take on the machines they are meant for: `python -m benchmarks.experiment_costs` (or `make
plans`).

Compiles NAG's training step at the models' widths for chips that are not there, what
benchmarks/results/experiment_costs.json lacks, and writes the table of experiments/README.md. cuDNN attention, which a
GPU run takes, cannot be compiled without a GPU; tokamax's stands in its place.
"""

import math

from benchmarks import plan_tables as tables
from benchmarks.compiled import MINUTES, ROOT, main
from experiments.harness.cost import Cost, Machine, cost
from experiments.harness.recipe import Recipe, load, names
from experiments.harness.settings import brief
from nagjax.options import read_options
from nagjax.plan.compile import plan
from nagjax.plan.order import filled
from nagjax.plan.topology import parse

VOCAB = 257  # bytes
CASES = [  # topology, width, blocks, context, sequences per step, remat
    ("h200x1", "128", "1000", "256", "64", "block"),
    ("h200x1", "256", "64", "512", "16", "none"),
    ("h200x1", "512", "24", "512", "64", "none"),
    ("v5e:4x4", "256", "1000", "512", "128", "block"),
    ("v5e:4x4", "512", "64", "1024", "64", "none"),
]
ATTENTION = {"h200x1": "tokamax", "v5e:4x4": "auto"}


def machine(topology: str, start: float, limit: float) -> Machine:
    found = parse(topology)
    return Machine(topology, found.size * found.chip.flops, start, limit)


MACHINES = {"h200": machine("h200x1", 15.0, 0.5), "paper": machine("v5e:4x4", 60.0, 24.0)}  # by size of a recipe


def measured(topology: str, width: str, depth: str, context: str, batch: str, remat: str) -> dict:
    sizes = {"width": int(width), "depth": int(depth), "context": int(context), "batch": int(batch)}
    options = {"scheme": "nag", "remat": remat, "attention": ATTENTION[topology], **sizes}
    config = filled(read_options(options).config(), parse(topology), VOCAB, batch_given=True, mesh_given=False)
    found = plan(config, parse(topology), seconds=60 * MINUTES)
    kept = ("fits", "parameters", "model_flops_per_token", "tokens_per_second", "highest_mfu")
    return {name: found[name] for name in kept} | {"limit": found["bound"]["limit"]}


def highest_mfu(results: list[dict], topology: str, width: int) -> float:
    """The highest MFU of the planned model on that machine whose width is nearest to `width`."""
    planned = {int(one["case"][1]): one["highest_mfu"] for one in results if one["case"][0] == topology}
    return planned[min(planned, key=lambda own: abs(math.log(own / width)))]


def costs(recipe: Recipe, size: str, results: list[dict]) -> Cost:
    where = MACHINES[size]
    return cost(recipe.plan(recipe.sizes[size]), where, lambda width: highest_mfu(results, where.topology, width))


def texts(results: list[dict]) -> dict[str, str]:
    rows = []
    for recipe in map(load, names()):
        for size, where in MACHINES.items():
            found = costs(recipe, size, results) if size in recipe.sizes else None
            if found and found.runs:
                told = brief(found.least), brief(found.most)
                each = told[0] if told[0] == told[1] else " to ".join(told)
                cells = recipe.name, size, f"`{where.topology}`", str(found.runs), brief(found.tokens), each
                rows.append((*cells, f"{found.flops:.1e}", f"{found.hours:.2f}"))
    head = ("recipe", "size", "machine", "runs", "tokens", "per run", "FLOP", "hours")
    return {"costs": tables.table(head, rows)}


PAGES = {ROOT / "experiments" / "README.md": texts}


if __name__ == "__main__":
    main("experiment_costs", CASES, measured, PAGES)
