"""Train plain, LNS, Review and NAG on this machine and compare them."""

import time
from pathlib import Path
from typing import Annotated

from nagjax.console import say
from nagjax.errors import UserError
from nagjax.memory import keep_freed_memory
from nagjax.options import read_options
from nagjax.ranges import Count, Range, Seed

PROMPT = "def "


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
) -> None:
    """Train residual schemes side by side: same text, seed and number of tokens, each at its own default learning rate.

    If it was interrupted, the same command continues it. The report is OUT/report.html.

    Args:
        depth: blocks.
        width: features of the residual.
        steps: training steps of each scheme.
        batch: sequences per step.
        context: tokens of a sequence.
        schemes: schemes to train.
        seed: of the initial values and the order of the data.
        data: stdlib (the sources of Python's standard library), or a folder made by nagjax data prepare.
        out: folder of the runs and of the report.
        fresh: delete earlier runs in OUT and start over.
    """
    if not schemes or len(set(schemes)) < len(schemes):
        raise UserError("schemes", schemes, "name at least one scheme, and no scheme twice")
    shared = {"depth": depth, "width": width, "context": context, "steps": steps, "batch": batch, "seed": seed}
    shared |= {"eval_every": max(steps // 4, 1), "eval_batches": 24, "save_every": 50, "keep": 1}
    runs = [read_options(shared | {"scheme": name, "data.path": data, "data.seed": seed}) for name in schemes]
    tokens = steps * batch * context
    say(f"{len(runs)} schemes, {depth} blocks x {width}, {tokens:,} tokens each of {data}, in {out}")
    keep_freed_memory()

    from rich.console import Console

    from nagjax.files import write_text
    from nagjax.generate.sample import complete
    from nagjax.report.report import write_report
    from nagjax.report.table import comparison_table, to_rich
    from nagjax.runs.lock import WriterLock
    from nagjax.runs.log import load_run
    from nagjax.runs.names import SAMPLE
    from nagjax.runs.opening import open_run
    from nagjax.train.loop import train

    configs, console, began, folders = [run.config() for run in runs], Console(), time.monotonic(), []
    for config, run in zip(configs, runs, strict=True):
        label = f"{config.scheme.title:{max(len(c.scheme.title) for c in configs)}}"
        folders.append(train(config, out / run.folder.name, fresh=fresh, label=label))
        sample = complete(open_run(folders[-1]), [PROMPT], tokens=min(96, context - 8), temperature=0.8, top_p=0.95)
        with WriterLock(folders[-1], "demo"):
            write_text(folders[-1] / SAMPLE, f"{PROMPT}{sample[0]}\n")
    logs = [load_run(folder) for folder in folders]
    console.print(to_rich(comparison_table(logs), console.width))
    report = write_report(logs, out, f"{depth} blocks deep: what each residual scheme made of it")
    console.print(f"{time.monotonic() - began:.0f} s   report: {report}")
