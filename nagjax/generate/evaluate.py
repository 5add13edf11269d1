"""Validation of a trained run, on its own corpus or on another corpus with the same tokenizer."""

from pathlib import Path

import numpy as np

from nagjax.data import DataConfig, Dataset, open_dataset
from nagjax.data.shares import parse_mix
from nagjax.data.stdlib import STDLIB
from nagjax.data.storage import HUB_PREFIX
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
    """Scores a model on validation text: an open run, or the newest checkpoint in a run's folder.

    data: `"stdlib"` or a prepared folder; None: the run's own corpus. batches: the number of batches, of the run's
    batch size, from the beginning; None: all. weights: "int8" rounds matrices to 8 bits first
    (`nagjax.generate.weights`).

    Returns a dict of step, loss (nats per token), perplexity (its exponential), bits_per_byte (None where the targets
    stand for no bytes), accuracy (share of targets that were the likeliest), tokens (counted targets), for a mixture
    loss/NAME of each corpus, and depth: telemetry by name, mean over all tokens that are not padding, one value per
    sublayer (log_norm has one more, in front of the first).

    With Mixture-of-Depths these are the scores under top-k. There are also mod_rate, mod_rate_attention and
    mod_rate_mlp (share of the (token, sublayer) pairs skipped), and agreement of the causal decider with top-k over the
    routed sublayers. The scores under the causal decider on the same text are added with the prefix causal_:
    causal_loss, causal_bits_per_byte, causal_accuracy, causal_mod_rate (also of attention and of MLP), and in depth
    causal_executed by sublayer. A run at a calibrated rate has no capacities, so all its scores are under the causal
    decider.

    Raises UserError for all that `open_run` raises, a model that is not causal, `batches` below 1, a missing corpus, a
    corpus with another tokenizer, and batches in which no target counts.
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
    """Scores and telemetry of an open run on the first `batches` (None: all) of a text, by top-k or by its causal
    decider."""
    evaluator = Evaluator(run.blueprint, dataset, causal=causal)
    return evaluator(run.params, run.mod, run.step, evaluator.batches(batches))


def _elsewhere(data: DataConfig) -> bool:
    """Whether a corpus is named by a relative path that leads nowhere from here."""
    names = [part.path for part in parse_mix(data.mix)] or [data.path]
    local = [Path(name) for name in names if name != STDLIB and "://" not in name and not name.startswith(HUB_PREFIX)]
    return any(not path.is_absolute() and not path.exists() for path in local)


def run_text(run: OpenRun, data: str | None = None, split: str = "validation") -> Dataset:
    """A split of `"stdlib"` or of a prepared folder; with `data` None, of the run's own corpus.

    Raises UserError for a missing corpus, a corpus with another tokenizer, a corpus of the run that has changed since,
    and a model that was imported without a tokenizer.
    """
    if isinstance(run.tokenizer, NoTokenizer):
        raise UserError("tokenizer", None, NO_TOKENIZER)
    if data is None:
        given = run.tokenizer if run.config.data.path == STDLIB else None  # a mixture has this path, too
        try:
            dataset = open_dataset(run.config.data, split=split, tokenizer=given)
        except UserError as error:
            if error.field not in ("data.path", "data.mix") or not _elsewhere(run.config.data):
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
