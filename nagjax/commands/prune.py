"""Remove blocks from a trained model, by rule or by list; the rest is a new run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

from nagjax.arguments import POSITIONAL, Given
from nagjax.console import say
from nagjax.errors import UserError
from nagjax.memory import keep_freed_memory
from nagjax.ranges import Count, Natural, Positive


def main(
    runs: Annotated[tuple[Path, ...], POSITIONAL],
    out: Path,
    rule: Literal["late", "penultimate", "influence", "angle", "drop"] = "drop",
    count: Count | None = None,
    blocks: str = "",
    heal_steps: Natural = 0,
    lr: Positive | None = None,
    curve: bool = False,
    data: str | None = None,
    batches: Count = 8,
    devices: Count = 1,
    *,
    given: Given,
) -> None:
    """Remove blocks from a model and save the rest as a new run. The blocks that stay keep their place in depth, and
    the source run is not changed.

    Args:
        runs: a run folder, which nagjax import may have written; with --curve one or two of them.
        out: the new run's folder; with --curve, the folder of curve.json and curve.png.
        rule: how the blocks to remove are chosen. late: the deepest; penultimate: the deepest except the last;
            influence: those of least influence; angle: the consecutive blocks that turn the residual stream least;
            drop: those whose removal alone adds least loss.
        count: number of blocks to remove.
        blocks: numbers of the blocks to remove, in place of a rule, such as 4,8,21-24; block 1 is nearest to the
            embedding.
        heal_steps: training steps after the removal.
        lr: learning rate of these steps.
        curve: remove nothing; show, for every rule, the loss as more and more blocks are left out.
        data: another corpus with the same tokenizer to measure and heal on; by default the run's own, or stdlib for an
            imported model.
        batches: validation batches for each loss.
        devices: split parameters and batches over this many of this machine's devices; the number must divide the run's
            batch, which is 1 for an imported model.
    """
    chosen = [block - 1 for block in block_list(blocks)]
    if curve:
        gone = ("rule", "count", "blocks", "heal_steps", "lr")
        given.refuse(gone, "--curve removes nothing, and tries every rule: leave it out")
        _curve(runs, out, data, batches, devices)
        return
    if blocks:
        given.refuse(("rule", "count"), "give either --blocks, or --count and a --rule")
    if len(runs) != 1:
        raise UserError("runs", [str(run) for run in runs], "prune one run at a time")
    say(f"pruning {runs[0]}, into {out}")
    keep_freed_memory()
    from nagjax.report.labels import number
    from nagjax.report.pruning import prune
    from nagjax.train.distributed.mesh import local_devices

    options = {"rule": rule, "count": count, "blocks": chosen, "heal_steps": heal_steps, "lr": lr}
    record = prune(runs[0], out, batches=batches, data=data, devices=local_devices(devices), **options)
    loss, gone = record["loss"], ", ".join(str(block + 1) for block in record["removed"])
    before, after, healed = (number(loss[name], 4) for name in ("before", "after", "healed"))
    then = f", healed {healed}" if heal_steps else ""
    print(f"removed blocks {gone}: loss {before}, without them {after}{then}\n{out}")


def _curve(runs: Sequence[Path], out: Path, data: str | None, batches: int, devices: int) -> None:
    if not 1 <= len(runs) <= 2 or len({run.resolve() for run in runs}) < len(runs):
        raise UserError("runs", [str(run) for run in runs], "--curve takes one run, or two others side by side")
    say(f"loss without more and more blocks of {' and '.join(map(str, runs))}, into {out}")
    from nagjax.files import check_writable, write_bytes, write_text
    from nagjax.report.curve import pruning_curve
    from nagjax.report.curve_plot import curve_plot
    from nagjax.report.labels import number
    from nagjax.runs.folder import read_config
    from nagjax.runs.lock import lock_of_report
    from nagjax.train.distributed.mesh import local_devices

    names = [read_config(run).scheme.title for run in runs]
    if len({*names}) < len(names):
        names = [f"{name}, {run}" for name, run in zip(names, runs, strict=True)]
    check_writable(out)
    there = local_devices(devices)
    with lock_of_report(out, "prune --curve"):
        curves = [pruning_curve(run, batches=batches, data=data, devices=there) for run in runs]
        write_bytes(out / "curve.png", curve_plot(list(zip(names, curves, strict=True))))
        write_text(out / "curve.json", json.dumps(dict(zip(map(str, runs), curves, strict=True))))
    for name, curve in zip(names, curves, strict=True):
        counts = [count for count, _, _ in next(iter(curve["rules"].values()))]
        print(f"{name}: loss by blocks left out\n" + f"{'rule':12}" + "".join(f"{count:>9}" for count in counts))
        for rule, points in curve["rules"].items():
            print(f"{rule:12}" + "".join(f"{number(loss, 4):>9}" for _, loss, _ in points))
    print(out / "curve.png")


def block_list(text: str) -> list[int]:
    """The numbers of a list of blocks such as 4,8,21-24, counted from 1. Raises UserError for any other text."""
    try:
        ends = [[int(end) for end in part.split("-")] for part in text.split(",") if part]
        if any(len(pair) > 2 or pair[0] > pair[-1] or pair[0] < 1 or pair[-1] > 10**6 for pair in ends):
            raise ValueError(text)
        return [block for pair in ends for block in range(pair[0], pair[-1] + 1)]
    except ValueError:
        fix = "give blocks, counted from 1, and ranges of them, separated by commas, like 4,8,21-24"
        raise UserError("blocks", text, fix) from None
