"""nagjax calibrate and map: adaptive depth of trained runs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from nagjax.commands.options import parse
from nagjax.errors import UserError
from nagjax.files import write_bytes

RunFolder = Annotated[Path, tyro.conf.Positional]


def calibrate(args: Sequence[str]) -> None:
    def command(
        run: RunFolder,
        rates: str = "0,0.1,0.2,0.3,0.4,0.5",
        choose: float | None = None,
        rise: float = 0.02,
        batches: int = 8,
    ) -> None:
        """Sweep one threshold on the angle of a dense NAG run; the chosen point is used by eval, generate and map.

        Writes dial.json, dial.png and, beside the checkpoints, calibration.json.

        Args:
            run: the folder of a nag run trained without --mod.
            rates: shares of the (token, sublayer) pairs to skip, separated by commas.
            choose: the rate to use from now on; 0 goes back to the dense model.
            rise: without --choose, the highest rate is taken whose loss rises by at most this, in nats per token.
            batches: validation batches for each loss.
        """
        from nagjax.generate.calibrate import calibrate as calibrate_run
        from nagjax.report.maps import dial_plot
        from nagjax.runs.names import DIAL_PLOT

        dial = calibrate_run(run, _numbers("rates", rates), choose=choose, rise=rise, batches=batches)
        write_bytes(run / DIAL_PLOT, dial_plot(dial))
        dense = dial["dense"]
        print("  rate  skipped (attention, MLP)  threshold   FLOPs    loss  at random  last blocks off (FLOPs)")
        print(f"  0.00    0.0%  (  0.0%,   0.0%)          -  1.000  {dense['loss']:.4f}")
        for p in dial["points"]:
            mark = "*" if p["rate"] == dial["chosen"] else " "
            by_kind = f"({p['mod_rate_attention']:6.1%}, {p['mod_rate_mlp']:6.1%})"
            late = f"{p['late_loss']:.4f} ({p['late_blocks']} off, {p['late_flops'] / dense['flops']:.3f})"
            print(
                f"{mark} {p['rate']:.2f}  {p['mod_rate']:6.1%}  {by_kind}  {p['threshold']:9.5f}  "
                f"{p['flops'] / dense['flops']:.3f}  {p['loss']:.4f}     {p['random_loss']:.4f}  {late}"
            )
        print(
            f"rate {dial['chosen']:g} is used by eval, generate and map"
            if dial["chosen"]
            else "the dense model is used"
        )

    parse(command, args, "calibrate")


def draw_map(args: Sequence[str]) -> None:
    def command(run: RunFolder, text: str | None = None, file: Path | None = None, top_k: bool = False) -> None:
        """Draw which sublayers each token of a text goes through, coloured by angle: map.png in the run's folder.

        Args:
            run: a run folder.
            text: the text.
            file: a file with the text.
            top_k: choose tokens by capacity, as in training, instead of by the causal decider.
        """
        from nagjax.generate.paths import read_text, token_paths
        from nagjax.report.maps import write_map
        from nagjax.runs.opening import open_run

        opened = open_run(run)
        paths = token_paths(opened, read_text(text, file), top_k=top_k)
        model = opened.config.model
        title = f"{opened.config.scheme.title}, {model.depth} blocks x {model.width}"
        print(f"{1 - paths['ran'].mean():.1%} of the (token, sublayer) pairs skipped: {write_map(paths, run, title)}")

    parse(command, args, "map")


def _numbers(field: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(field, text, "give numbers separated by commas, like 0,0.1,0.2") from None
