"""Pruning curves: loss against the number of blocks left out, by rule, with no training."""

from collections.abc import Sequence
from pathlib import Path

from nagjax.discovery import pick
from nagjax.errors import UserError
from nagjax.generate.evaluate import run_text
from nagjax.measure.cuts import RULES, Cutter, choose
from nagjax.measure.masked import masked
from nagjax.runs.opening import OpenRun, check_opened, open_run
from nagjax.train.evaluator import Evaluator
from nagjax.train.loss import Batch

SHARES = (0, 1 / 24, 1 / 12, 1 / 8, 1 / 6, 1 / 4, 1 / 3, 1 / 2)  # of the blocks


def pruning_curve(
    folder: str | Path, *, rules: Sequence[str] = tuple(RULES), batches: int = 8, data: str | None = None
) -> dict:
    """Validation loss (nats per token, first `batches` batches) against blocks left out, with no training.

    Returns `depth`, `loss` (of the whole model), `batches`, and `rules`: by name a list of [blocks left out, loss,
    which]. Blocks are chosen on training text. Raises UserError: all that `open_run` raises, and an unknown rule.
    """
    for rule in rules:
        pick("rule", rule, RULES, "rules")
    run = open_run(folder, calibrated=False)
    return curve_of(run, Cutter(run), rules, batches, data)


def curve_of(run: OpenRun, cutter: Cutter, rules: Sequence[str], batches: int, data: str | None = None) -> dict:
    """`pruning_curve` of an open run."""
    check_depth(run)
    held_out = text_batches(run, data, "validation", batches)
    measured = measure(run, cutter, rules, batches, data)
    counts = sorted({round(cutter.depth * share) for share in SHARES})
    points = {}
    for rule in rules:
        sets = [choose(rule, count, *measured) for count in counts]
        points[rule] = [[len(gone), cutter.loss(held_out, gone), gone] for gone in sets]
    return {"depth": cutter.depth, "loss": cutter.loss(held_out), "batches": len(held_out), "rules": points}


def measure(run: OpenRun, cutter: Cutter, rules: Sequence[str], batches: int, data: str | None = None) -> tuple:
    """What `choose` decides by: cosines, angles, and, where a rule asks for it, the damage of leaving out each block
    alone. On a quarter as many batches, of training text."""
    text = text_batches(run, data, "train", max(batches // 4, 1))
    return *cutter.measure(text), cutter.drops(text) if "drop" in rules else None


def text_batches(run: OpenRun, data: str | None, split: str, count: int) -> list[Batch]:
    """The first batches of a text, of the run's size; with masks for a bidirectional model.

    Raises UserError for an encoder without a head.
    """
    run.config.model.check_logits("the loss of masked tokens")
    found = list(Evaluator(run.blueprint, run_text(run, data, split)).batches(count))
    if run.config.model.causal:
        return found
    return [masked(batch, run.tokenizer, seed) for seed, batch in enumerate(found)]


def check_depth(run: OpenRun) -> None:
    """Raises UserError for a model of a single block, which cannot be left out."""
    check_opened(run)
    if run.config.model.depth == 1:
        raise UserError("run", str(run.folder), "has a single block, which cannot be left out: give a deeper model")
