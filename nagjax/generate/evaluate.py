"""Validation of a trained run: on its own corpus or on another one with the same tokenizer."""

from pathlib import Path

import numpy as np

from nagjax.data import DataConfig, Dataset, open_dataset
from nagjax.data.stdlib import STDLIB
from nagjax.data.tokenizer import NO_TOKENIZER, NoTokenizer
from nagjax.errors import UserError, renamed
from nagjax.generate.weights import Weights, with_weights
from nagjax.ranges import Count, check_value
from nagjax.runs.identity import check_corpus
from nagjax.runs.opening import OpenRun, open_run, option_of
from nagjax.train.evaluator import Evaluator, with_causal


def evaluate(
    run: str | Path | OpenRun, *, data: str | None = None, batches: int | None = None, weights: Weights = "full"
) -> dict:
    """What a model makes of validation text: an open one, or the newest checkpoint of a run's folder.

    data: `"stdlib"` or a prepared folder, the run's own corpus unless given. batches: the first so many
    batches of the run's batch size, all unless given. weights: "int8" rounds matrices to 8 bits first
    (`nagjax.generate.weights`).

    Returns step, loss (nats per token), perplexity (its exponential), bits_per_byte (None where the targets
    stand for no bytes), accuracy (share of targets that were the likeliest), tokens (counted targets), and
    depth: telemetry by name, averaged over the batches, one value per sublayer (log_norm: and one before).

    With Mixture-of-Depths all this is under top-k, with mod_rate in all, of attention and of MLP (share of the
    (token, sublayer) pairs skipped), and agreement of the causal decider with top-k, over the routed sublayers; and
    what the causal decider makes of the same text stands beside it: causal_loss, causal_bits_per_byte,
    causal_accuracy, causal_mod_rate in the same three parts, and depth's causal_executed by sublayer. A run without
    capacities of its own, at a calibrated rate, has the causal rule alone.

    Raises UserError: all that `open_run` raises, `batches` below 1, no such corpus, one of another tokenizer.
    """
    check_value("batches", batches, Count | None)
    run = run if isinstance(run, OpenRun) else open_run(run)
    run.config.model.check_causal("the loss of next tokens")
    run = with_weights(run, weights)
    dataset = run_text(run, data)
    scores, depth = score(run, dataset, batches, causal=run.calibrated)
    if run.config.model.mod.active and not run.calibrated:
        scores, depth = with_causal((scores, depth), score(run, dataset, batches, causal=True))
    tokens = scores.pop("targets")
    perplexity = float(np.exp(scores["loss"]))
    return {"step": run.step, **scores, "perplexity": perplexity, "tokens": tokens, "depth": depth}


def score(run: OpenRun, dataset: Dataset, batches: int | None, *, causal: bool) -> tuple[dict, dict]:
    """Scores and telemetry of an open run on the first batches of a text, by top-k or by its causal decider."""
    evaluator = Evaluator(run.blueprint, dataset, causal=causal)
    return evaluator(run.params, run.mod, run.step, evaluator.batches(batches))


def run_text(run: OpenRun, data: str | None = None, split: str = "validation") -> Dataset:
    """A split of `"stdlib"` or of a prepared folder, of the run's own corpus unless given.

    Raises UserError: no such corpus, one of another tokenizer, a corpus of the run that has changed since, or a model
    that came without a tokenizer.
    """
    if isinstance(run.tokenizer, NoTokenizer):
        raise UserError("tokenizer", None, NO_TOKENIZER)
    if data is None:
        given = run.tokenizer if run.config.data.path == STDLIB else None  # of a mixture path is that, too
        try:
            dataset = open_dataset(run.config.data, split=split, tokenizer=given)
        except UserError as error:
            named = Path(str(error.value))
            if error.field not in ("data.path", "data.mix") or named.is_absolute() or named.exists():
                raise
            fix = f"{error.fix}; {run.folder} names it from where it was trained: go there, or give --data"
            raise UserError(error.field, error.value, fix) from None
        check_corpus(run.folder, dataset)
        return dataset
    given = run.tokenizer if data == STDLIB else None
    with renamed("data.path", "data"):
        dataset = open_dataset(DataConfig(path=data, rows=run.config.data.rows), split=split, tokenizer=given)
    if dataset.tokenizer.fingerprint != run.tokenizer.fingerprint:
        names = f"the tokenizer {dataset.tokenizer.name}, the run reads another, {run.tokenizer.name}"
        its = option_of(run.tokenizer, run.folder)
        fix = f"was prepared with {names}: prepare it with that one (--tokenizer {its})"
        raise UserError("data", data, fix)
    return dataset
