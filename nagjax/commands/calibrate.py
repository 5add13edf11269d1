"""Measure how much of a dense NAG run can be skipped, and at what loss."""

from pathlib import Path
from typing import Annotated

from nagjax.arguments import POSITIONAL, Given
from nagjax.console import say
from nagjax.errors import UserError
from nagjax.ranges import Count, NonNegative, Range

DENSE = "the dense model is used"


def main(
    run: Annotated[Path, POSITIONAL],
    rates: str = "0,0.1,0.2,0.3,0.4,0.5",
    choose: Annotated[float, Range(ge=0, lt=1)] | None = None,
    rise: NonNegative = 0.02,
    batches: Count = 8,
    *,
    given: Given,
) -> None:
    """Measure what a dense NAG run loses if tokens skip sublayers that would rotate them by less than one threshold.
    Several rates of skipping are tried; eval, generate, chat, map and diagnose then use the chosen rate.

    Writes skip_curve.json, skip_curve.png and, beside the checkpoints, calibration.json.

    Args:
        run: the folder of a nag run trained without --mod.
        rates: shares of the (token, sublayer) pairs to skip, separated by commas.
        choose: the rate to use from now on; 0 returns to the dense model, and measures nothing unless --rates is given.
        rise: without --choose, take the highest rate at which the loss rises by at most this many nats per token.
        batches: validation batches for each loss.
    """
    if choose == 0.0 and "rates" not in given:
        given.refuse(("rise", "batches"), "nothing is measured with --choose 0 alone: leave it out, or give --rates")
        from nagjax.measure.skip_curve import undo

        undo(run)
        print(DENSE)
        return
    if choose is not None:
        given.refuse(("rise",), "the point is chosen by --choose: leave one of the two out")
    tried = _numbers("rates", rates)
    say(f"calibrating {run}: {len(tried)} rates, {batches} validation batches each")
    from nagjax.files import write_bytes
    from nagjax.measure.skip_curve import calibrate
    from nagjax.report.maps import skip_curve_plot
    from nagjax.runs.names import SKIP_CURVE_PLOT

    found = calibrate(run, tried, choose=choose, rise=rise, batches=batches, say=say)
    write_bytes(run / SKIP_CURVE_PLOT, skip_curve_plot(found))
    dense = found["dense"]
    print(
        "  rate  skipped (attention, MLP)  threshold   FLOPs    loss  other tokens  at random  "
        "blocks off (FLOPs): loss, of least influence, of the last"
    )
    print(f"  0.00    0.0%  (  0.0%,   0.0%)          -  1.000  {dense['loss']:.4f}")
    for p in found["points"]:
        mark = "*" if p["rate"] == found["chosen"] else " "
        by_kind = f"({p['mod_rate_attention']:6.1%}, {p['mod_rate_mlp']:6.1%})"
        tokens = f"{p['loss']:.4f}        {p['tokens_loss']:.4f}     {p['random_loss']:.4f}"
        whole = ", ".join(
            f"{len(p[f'{way}_blocks'])} ({p[f'{way}_flops'] / dense['flops']:.3f}): {p[f'{way}_loss']:.4f}"
            for way in ("influence", "late")
        )
        print(
            f"{mark} {_rate(p['rate']):4}  {p['mod_rate']:6.1%}  {by_kind}  {p['threshold']:9.5f}  "
            f"{p['flops'] / dense['flops']:.3f}  {tokens}  {whole}"
        )
    used = f"rate {found['chosen']:g} is used by eval, generate, chat, map and diagnose"
    print(used if found["chosen"] else DENSE)


def _rate(rate: float) -> str:
    """With two decimals, or with as many as tell it from its neighbours."""
    short = f"{rate:.2f}"
    return short if float(short) == rate else f"{rate:g}"


def _numbers(field: str, text: str) -> list[float]:
    try:
        return [float(part) for part in text.split(",")]
    except ValueError:
        raise UserError(field, text, "give numbers separated by commas, like 0,0.1,0.2") from None
