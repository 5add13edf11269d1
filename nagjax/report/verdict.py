"""States the result of a comparison in words, and lists what makes the comparison unequal."""

import contextlib
import json
import math
from collections.abc import Sequence
from pathlib import Path

from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.report.labels import count, listing, number, rate, run_labels
from nagjax.runs.config import OptimizerConfig, RunConfig, TrainConfig, completed, flatten
from nagjax.runs.identity import known_text, read_id, start_of
from nagjax.runs.log import Evaluation, Run

_TEXT_FIELDS = ("data.path", "data.mix", "data.tokenizer")
_TRAIN_FIELDS = ("seed", "steps", "batch", "z_loss", "ema", "eval_batches")


def ranking(runs: Sequence[Run]) -> tuple[list[float], str]:
    """The value by which each run is ranked, lower being better, and its unit: bits per byte, which can be compared
    across tokenizers. If no run has any, because targets stand for no bytes, nats per token, provided that all runs
    share text and tokenizer.

    Raises `UserError` for a run without an evaluation.
    """
    evaluations = [run.last_eval for run in runs]
    bits = [e.bits_per_byte for e in evaluations]
    if any(map(math.isfinite, bits)) or not one_text(runs):
        return bits, "bits per byte"
    return [e.loss for e in evaluations], "nats per token"


def verdict(runs: Sequence[Run]) -> str:
    """Which run is ahead and by how much, from the last evaluations, ranked by `ranking`.

    Nats per token are given beside bits per byte if all runs share one tokenizer. If the runs have different texts,
    none is ahead. Raises `UserError` for a run without an evaluation.
    """
    labels, evaluations = run_labels(runs), [run.last_eval for run in runs]
    values, unit = ranking(runs)
    both = unit == "bits per byte" and one_text(runs)
    order = sorted((i for i, value in enumerate(values) if math.isfinite(value)), key=values.__getitem__)
    lost = _unranked(labels, evaluations, order)
    if not order:
        return "No run is ahead." + lost
    if not same_text(runs):
        told = listing([f"{labels[i]} has {number(values[i], 4)}" for i in order])
        return f"No run is ahead, as each has a validation text of its own: {told} {unit}.{lost}"

    def score(i: int) -> str:
        nats = f" ({number(evaluations[i].loss, 4)} nats/token)" if both else ""
        return f"{number(values[i], 4)} {unit}{nats}"

    def behind(i: int) -> str:
        nats = evaluations[i].loss - evaluations[first].loss
        amount = f"{number(values[i] - values[first], 4)} {unit}" + (f" ({number(nats, 4)} nats/token)" if both else "")
        return f"{amount} better than {labels[i]}"

    first, *rest = order
    tokens = {e.tokens for e in evaluations}
    after = f"After {count(tokens.pop())} training tokens" if len(tokens) == 1 else "Each run at its last evaluation:"
    if not rest:
        return f"{after} {labels[first]} reaches {score(first)} on the validation text." + lost
    level = [i for i in order if number(values[i], 4) == number(values[first], 4)]
    if len(level) > 1:
        names = listing([labels[i] for i in level])
        head = f"{after} {names} are level at {score(first)} on the validation text"
        rest = [i for i in rest if i not in level]
        told = rest[:1]
    else:
        head = f"{after} {labels[first]} is ahead with {score(first)} on the validation text"
        told = rest[:1] + [i for i in rest[1:] if runs[i].scheme == "plain"]
    sentence = head + (": " + listing([behind(i) for i in told]) if told else "") + "."
    if scored_parts(runs):
        sentence += " They were scored on different parts of that text: nagjax eval RUN scores a run on all of it."
    return sentence + lost + _spread(runs)


def scored_parts(runs: Sequence[Run]) -> bool:
    """Whether runs were scored on different parts of one text, judged by the number of bytes: an evaluation ends after
    `eval_batches` of `batch` rows of `context` tokens. False if the bytes are not known, as those of a mixture under
    several tokenizers."""
    mixed = any(_fair_fields(run).get("data.mix") for run in runs)
    if not same_text(runs) or mixed and not one_text(runs):
        return False
    nats = [run.last_eval.loss * float(run.evals.targets[-1]) for run in runs]
    scored = [own / (run.last_eval.bits_per_byte or math.nan) for own, run in zip(nats, runs, strict=True)]
    return all(map(math.isfinite, scored)) and max(scored) > 1.001 * min(scored)


def one_text(runs: Sequence[Run]) -> bool:
    """Whether all runs read the same text with the same tokenizer: judged by content, or, if a run has not stored it,
    by the names in their configs."""
    fields = [_fair_fields(run) for run in runs]
    vocabularies = {own.get("model.vocab") for own in fields}
    return len(vocabularies) == 1 and len({*_texts(runs)}) == 1


def same_text(runs: Sequence[Run]) -> bool:
    """Whether all runs read the same text, possibly with several tokenizers; it then has equal numbers of documents and
    bytes."""
    known = _known_texts(runs)
    if known is None:
        return len({tuple(_fair_fields(run).get(name) for name in ("data.path", "data.mix")) for run in runs}) == 1
    texts, tokenizers = {*_texts(runs)}, {own.get("tokenizer") for own in known}
    sizes = {(own.get("documents"), own.get("bytes")) for own in known}
    return len(texts) == 1 or (len(texts) == len(tokenizers) and len(sizes) == 1)


def _known_texts(runs: Sequence[Run]) -> list[dict] | None:
    """What the runs have stored about their texts; None unless all have."""
    found = [own for run in runs if (own := known_text(run.path))]
    return found if len(found) == len(runs) else None


def _texts(runs: Sequence[Run]) -> list[str]:
    """For each run a value that is equal for runs on the same text with the same tokenizer."""
    known = _known_texts(runs)
    if known is not None:
        return [json.dumps(own, sort_keys=True) for own in known]
    return [json.dumps([_fair_fields(run).get(name) for name in _TEXT_FIELDS]) for run in runs]


def _unranked(labels: Sequence[str], evaluations: Sequence[Evaluation], order: Sequence[int]) -> str:
    """Why the runs that are not in `order` are not ranked."""
    lost = [(label, math.isfinite(evaluations[i].loss)) for i, label in enumerate(labels) if i not in order]
    broken, silent = ([label for label, finite in lost if finite == kind] for kind in (False, True))
    said = f" {listing(broken)} ended without a finite score." if broken else ""
    if silent:
        said += f" There are no bits per byte of {listing(silent)}, whose targets stand for no bytes of text."
    return said


def learning_rates(runs: Sequence[Run]) -> str:
    """The learning rate of each run in one sentence."""
    if len({run.lr for run in runs}) == 1:
        who = "Every run uses" if len(runs) > 1 else f"{run_labels(runs)[0]} uses"
        return f"{who} the learning rate {rate(runs[0].lr)}."
    parts = [f"{label} {rate(run.lr)}" for label, run in zip(run_labels(runs), runs, strict=True)]
    return f"Learning rates differ from run to run: {listing(parts)}."


def differences(runs: Sequence[Run]) -> list[str]:
    """One line per field, other than scheme and learning rate, in which the runs differ.

    Compared are: the text, by content if all runs stored it; every field of `data` except the number of workers (with
    the text's content known, also except its path); every field of `model` and of `optimizer` except the peak learning
    rate (see `learning_rates`); the run that it started from; the fields of `train` in `_TRAIN_FIELDS`; the tokens
    trained at the last evaluation; and whether that was by top-k. A field that an earlier version lacked has its
    default.
    """
    flat = [_fair_fields(run) for run in runs]
    labels = run_labels(runs)
    lines = []
    if _known_texts(runs) is not None:
        where = [own["data.path"] if own["data.mix"] == "[]" else own["data.mix"] for own in flat]
        if len({*_texts(runs)}) > 1:
            alike = " (not the same by content)" if len({*where}) == 1 else ""
            told = ", ".join(f"{label} {place}" for label, place in zip(labels, where, strict=True))
            lines.append(f"text: {told}{alike}")
        flat = [{name: value for name, value in own.items() if name not in _TEXT_FIELDS} for own in flat]
    for name in sorted(set().union(*flat)):
        values = [fields.get(name, "absent") for fields in flat]
        if len(set(values)) > 1:
            told = ", ".join(f"{label} {value}" for label, value in zip(labels, values, strict=True))
            lines.append(f"{name}: {told}")
    return lines


def _fair_fields(run: Run) -> dict[str, str]:
    own = completed(RunConfig, {name: run.config[name] for name in ("scheme", "model")})
    optimizer = completed(OptimizerConfig, run.config["optimizer"])
    data = completed(DataConfig, run.config.get("data", {}))
    parts = flatten({"data": data, "model": own["model"], "optimizer": optimizer})
    fields = {name: json.dumps(value) for name, value in parts.items()} | {
        "start": _start(run),
        "tokens trained": f"{run.last_eval.tokens:,}",
        "judged": "by top-k, which looks at later tokens" if run.looks_ahead else "as sampled",
    }
    fields.pop("data.workers", None)  # it does not change the batches
    fields.pop("optimizer.lr", None)  # reported by `learning_rates`
    train = vars(TrainConfig()) | run.config.get("train", {})
    return fields | {f"train.{key}": json.dumps(train[key]) for key in _TRAIN_FIELDS}


def _start(run: Run) -> str:
    """Where the run began: the id of the run that it started from, because the path to that may differ."""
    path = run.config.get("start", "")
    known = start_of(run.path)
    if path and not known:  # of an older version, which stored the path
        with contextlib.suppress(UserError):
            known = read_id(Path(path))
    return f"run {known}" if known else json.dumps(path)


def _spread(runs: Sequence[Run]) -> str:
    """A warning if no scheme was run with two seeds, because there is then no measure of chance."""
    seeds: dict[str, set] = {}
    for run in runs:
        seeds.setdefault(run.scheme, set()).add(run.config.get("train", {}).get("seed"))
    if any(len(found) > 1 for found in seeds.values()):
        return ""
    return " One seed per scheme: how much of this is chance was not measured."
