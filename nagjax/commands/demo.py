"""Train plain, LNS, Review and NAG on this machine and compare them."""

import time
from pathlib import Path
from typing import Annotated

from nagjax.console import say
from nagjax.demo import demo_runs, train_all
from nagjax.files import check_writable
from nagjax.ranges import Count, Natural, Range, Seed, check_each_once


def main(
    depth: Count = 24,
    width: Count = 64,
    steps: Count = 200,
    batch: Count = 8,
    context: Annotated[int, Range(ge=16, le=2**31 - 1)] = 128,
    schemes: tuple[str, ...] = ("plain", "lns", "review", "nag"),
    seed: Seed = 0,
    data: str = "stdlib",
    out: Path = Path("runs/demo"),
    fresh: bool = False,
    processes: Natural = 0,
) -> None:
    """Train residual schemes side by side: same text, seed and number of tokens, each at its own default learning rate.

    If it was interrupted, the same command, without --fresh, continues it. The report is OUT/report.html.

    Args:
        depth: number of blocks.
        width: features of the residual stream.
        steps: training steps of each scheme.
        batch: sequences per step.
        context: tokens per sequence.
        schemes: schemes to train.
        seed: random seed of the initial values and the order of the data.
        data: stdlib (the sources of Python's standard library), or a folder made by nagjax data prepare.
        out: folder of the runs and of the report.
        fresh: start over; what these runs have written in OUT is deleted.
        processes: number of schemes trained at the same time, which share the cores; 0: one per core, but only one on
            an accelerator.
    """
    check_each_once("schemes", schemes, "scheme")
    shared = {"depth": depth, "width": width, "context": context, "steps": steps, "batch": batch, "seed": seed}
    shared |= {"eval_every": max(steps // 4, 1), "eval_batches": 24, "save_every": 50, "keep": 1}
    shared |= {"data.path": data, "data.seed": seed}
    demo_runs(schemes, shared)
    check_writable(out)
    tokens = steps * batch * context
    say(f"{len(schemes)} schemes, {depth} blocks x {width}, {tokens:,} tokens each of {data}, in {out}")
    began = time.monotonic()
    folders = train_all(schemes, shared, out, fresh, processes)

    from rich.console import Console

    from nagjax.report.report import write_report
    from nagjax.report.table import comparison_table, to_rich
    from nagjax.runs.log import load_run

    logs, console = [load_run(folder) for folder in folders], Console()
    console.print(to_rich(comparison_table(logs), console.width))
    report = write_report(logs, out, f"{depth} blocks deep: what each residual scheme made of it")
    console.print(f"{time.monotonic() - began:.0f} s   report: {report}")
