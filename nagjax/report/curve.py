"""Pruning curves: loss against the number of blocks left out, for each rule, without training."""

import math
from collections.abc import Sequence
from pathlib import Path

import jax

from nagjax.errors import UserError
from nagjax.generate.evaluate import run_text
from nagjax.measure.cuts import RULES, Cutter, check_rules, choose
from nagjax.measure.masked import masked
from nagjax.runs.opening import OpenRun, check_opened, open_run
from nagjax.train.evaluator import Evaluator
from nagjax.train.loss import Batch

SHARES = (0, 1 / 24, 1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2)  # of the blocks, that are left out


def pruning_curve(
    folder: str | Path,
    *,
    rules: Sequence[str] = tuple(RULES),
    batches: int = 8,
    data: str | None = None,
    devices: Sequence[jax.Device] | None = None,
) -> dict:
    """Validation loss (nats per token, on the first `batches` batches) against the number of blocks left out, without
    training.

    Returns a dict: `depth`, `loss` (of the whole model), `batches`, and `rules`, by name a list of [number of blocks
    left out, loss, their indices], where a loss that is not finite is None. The rules choose blocks on training text.
    Parameters and batches are split over the `devices`; None: one local device. Raises UserError for whatever
    `open_run` does, for an unknown rule, and for a whole model whose loss is not finite.
    """
    check_rules(rules)
    run = open_run(folder, devices=devices, calibrated=False)
    return curve_of(run, Cutter(run), rules, batches, data)


def curve_of(run: OpenRun, cutter: Cutter, rules: Sequence[str], batches: int, data: str | None = None) -> dict:
    """`pruning_curve` of an open run."""
    check_depth(run)
    held_out = text_batches(run, data, "validation", batches)
    whole = check_loss(run, cutter.loss(held_out))
    measured = measure(run, cutter, rules, batches, data)
    counts = sorted({round(cutter.depth * share) for share in SHARES})
    points = {}
    for rule in rules:
        sets = [choose(rule, count, *measured) for count in counts]
        points[rule] = [[len(gone), finite(cutter.loss(held_out, gone)), gone] for gone in sets]
    return {"depth": cutter.depth, "loss": whole, "batches": len(held_out), "rules": points}


def measure(run: OpenRun, cutter: Cutter, rules: Sequence[str], batches: int, data: str | None = None) -> tuple:
    """The measurements by which `choose` decides: cosines, angles, and, if a rule needs it, the loss that leaving out
    each block alone adds (else None). Made on training text, with a quarter as many batches."""
    text = text_batches(run, data, "train", max(batches // 4, 1))
    return *cutter.measure(text), cutter.drops(text) if "drop" in rules else None


def text_batches(run: OpenRun, data: str | None, split: str, count: int) -> list[Batch]:
    """The first `count` batches of a text, of the run's batch size; of a mixture at least one batch of each corpus;
    with masks for a bidirectional model.

    Raises UserError for an encoder without a head.
    """
    run.config.model.check_logits("the loss of masked tokens")
    found = list(Evaluator(run.blueprint, run_text(run, data, split)).batches(count))
    if run.config.model.causal:
        return found
    return [masked(batch, run.tokenizer, seed) for seed, batch in enumerate(found)]


def check_depth(run: OpenRun) -> None:
    """Raises UserError for a model of a single block, because that cannot be left out."""
    check_opened(run)
    if run.config.model.depth == 1:
        raise UserError("run", str(run.folder), "has a single block, which cannot be left out: give a deeper model")


def check_loss(run: OpenRun, loss: float) -> float:
    """The loss of the whole model. Raises UserError if it is not finite, because nothing can be compared with it
    then."""
    if not math.isfinite(loss):
        raise UserError("run", str(run.folder), f"has a loss of {loss} on this text, which tells nothing of its blocks")
    return loss


def finite(loss: float) -> float | None:
    """The loss for JSON: None if it is not finite."""
    return loss if math.isfinite(loss) else None
