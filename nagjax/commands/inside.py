"""nagjax diagnose and prune: looking inside a model, and taking blocks out of it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import tyro

from nagjax.commands.options import parse
from nagjax.errors import UserError
from nagjax.files import write_bytes, write_text

RunFolder = Annotated[Path, tyro.conf.Positional]


def diagnose(args: Sequence[str]) -> None:
    def command(
        run: RunFolder,
        out: Path | None = None,
        data: str | None = None,
        batches: int = 4,
        skip_batches: int = 4,
        curve_batches: int = 8,
    ) -> None:
        """How much of a model's depth is used, and which of its blocks could go: diagnosis.html and diagnosis.json.

        Args:
            run: a run folder, or a model that nagjax import reads.
            out: where the two files go; the run's folder by default.
            data: another corpus with the same tokenizer; the run's own by default.
            batches: of the run's size, for what one pass shows.
            skip_batches: for leaving out each block; one pass of twice the length for each block and batch.
            curve_batches: for the loss without several blocks.
        """
        from nagjax.interop.load import load
        from nagjax.report.diagnose_report import write_diagnosis
        from nagjax.report.diagnosis import Effort
        from nagjax.report.diagnosis import diagnose as diagnose_run

        for field, value in (("batches", batches), ("skip_batches", skip_batches), ("curve_batches", curve_batches)):
            if value < 1:
                raise UserError(field, value, "give a whole number of at least 1")
        effort = Effort(batches, skip_batches, curve_batches)
        record = diagnose_run(load(run), effort, data, say=lambda text: print(text, flush=True))
        page = write_diagnosis(record, out or run)
        print(f"{record['verdict']}\n{page}")

    parse(command, args, "diagnose")


def prune(args: Sequence[str]) -> None:
    def command(
        runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
        out: Path,
        rule: Literal["late", "influence", "angle", "drop"] = "drop",
        count: int | None = None,
        blocks: str = "",
        heal_steps: int = 0,
        lr: float | None = None,
        curve: bool = False,
        data: str | None = None,
        batches: int = 8,
    ) -> None:
        """Take blocks out of a model for good: the rest is a run of its own. The blocks that stay keep their place in
        depth; the source is left as it is.

        Args:
            runs: a run folder, also one that nagjax import has written; with --curve one or two.
            out: the new run's folder; with --curve, where curve.json and curve.png go.
            rule: who goes: the deepest; least influence; the neighbours that turn least; least loss alone.
            count: how many.
            blocks: which ones instead, counted from 0: 3,7,20-23.
            heal_steps: training steps afterwards, at the rate --lr.
            lr: learning rate of the healing.
            curve: remove nothing; show the loss without more and more blocks, by every rule.
            data: another corpus with the same tokenizer; the run's own by default.
            batches: validation batches for each loss.
        """
        if batches < 1:
            raise UserError("batches", batches, "give a whole number of at least 1")
        if curve:
            _curve(runs, out, data, batches)
            return
        from nagjax.commands.pruning import prune as prune_run

        if len(runs) != 1:
            raise UserError("runs", [str(run) for run in runs], "prune one run at a time")
        options = {"rule": rule, "count": count, "blocks": block_list(blocks), "heal_steps": heal_steps, "lr": lr}
        record = prune_run(runs[0], out, batches=batches, data=data, **options)
        loss = record["loss"]
        healed = "" if loss["healed"] is None else f", healed {loss['healed']:.4f}"
        print(
            f"removed {', '.join(map(str, record['removed']))}: loss {loss['before']:.4f}, without them "
            f"{loss['after']:.4f}{healed}\n{out}"
        )

    parse(command, args, "prune")


def _curve(runs: Sequence[Path], out: Path, data: str | None, batches: int) -> None:
    from nagjax.report.curve import pruning_curve
    from nagjax.report.curve_plot import curve_plot
    from nagjax.runs.folder import read_config

    if not 1 <= len(runs) <= 2:
        raise UserError("runs", [str(run) for run in runs], "a curve is of one run, or of two side by side")
    names = [read_config(run).scheme.title for run in runs]
    curves = [pruning_curve(run, batches=batches, data=data) for run in runs]
    out.mkdir(parents=True, exist_ok=True)
    write_bytes(out / "curve.png", curve_plot(list(zip(names, curves, strict=True))))
    write_text(out / "curve.json", json.dumps(dict(zip(map(str, runs), curves, strict=True))))
    for name, curve in zip(names, curves, strict=True):
        counts = [count for count, _, _ in next(iter(curve["rules"].values()))]
        print(f"{name}: loss by blocks left out\n" + f"{'rule':10}" + "".join(f"{count:>9}" for count in counts))
        for rule, points in curve["rules"].items():
            print(f"{rule:10}" + "".join(f"{loss:9.4f}" for _, loss, _ in points))
    print(out / "curve.png")


def block_list(text: str) -> list[int]:
    """3,7,20-23 as numbers. Raises UserError."""
    try:
        ends = [[int(end) for end in part.split("-")] for part in text.split(",") if part]
        if any(len(pair) > 2 or pair[0] > pair[-1] for pair in ends):
            raise ValueError(text)
        return [block for pair in ends for block in range(pair[0], pair[-1] + 1)]
    except ValueError:
        raise UserError("blocks", text, "give numbers and ranges separated by commas, like 3,7,20-23") from None
