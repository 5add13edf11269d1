"""What the numbers of a comparison say in words, and what makes the comparison unequal."""

import json
import math
from collections.abc import Sequence

from nagjax.report.labels import count, listing, number, rate, run_labels
from nagjax.runs.log import Run

_TRAIN_FIELDS = ("seed", "steps", "batch")


def verdict(runs: Sequence[Run]) -> str:
    """Who is ahead and by how much, from the last evaluations. The ranking is by bits per byte.

    Bits per byte compares across tokenizers; nats per token are added where all runs share one vocabulary.
    Raises `UserError` for a run with no evaluation yet.
    """
    labels, evaluations = run_labels(runs), [run.last_eval for run in runs]
    shared = len({run.config["model"].get("vocab") for run in runs}) == 1
    order = sorted(
        (i for i, e in enumerate(evaluations) if math.isfinite(e.bits_per_byte)),
        key=lambda i: evaluations[i].bits_per_byte,
    )
    lost = [label for i, label in enumerate(labels) if i not in order]
    broken = f" {listing(lost)} ended without a finite score." if lost else ""
    if not order:
        return "No run is ahead." + broken

    def score(i: int) -> str:
        nats = f" ({number(evaluations[i].loss, 4)} nats/token)" if shared else ""
        return f"{number(evaluations[i].bits_per_byte, 4)} bits per byte{nats}"

    def behind(i: int) -> str:
        bits = evaluations[i].bits_per_byte - evaluations[first].bits_per_byte
        nats = evaluations[i].loss - evaluations[first].loss
        amount = f"{number(bits, 4)} bits per byte" + (f" ({number(nats, 4)} nats/token)" if shared else "")
        return f"{amount} better than {labels[i]}"

    first, *rest = order
    tokens = {e.tokens for e in evaluations}
    after = f"After {count(tokens.pop())} training tokens" if len(tokens) == 1 else "Each run at its last evaluation:"
    if not rest:
        return f"{after} {labels[first]} reaches {score(first)} on the validation text." + broken
    level = [i for i in order if number(evaluations[i].bits_per_byte, 4) == number(evaluations[first].bits_per_byte, 4)]
    if len(level) > 1:
        names = listing([labels[i] for i in level])
        head = f"{after} {names} are level at {score(first)} on the validation text"
        rest = [i for i in rest if i not in level]
        told = rest[:1]
    else:
        head = f"{after} {labels[first]} is ahead with {score(first)} on the validation text"
        told = rest[:1] + [i for i in rest[1:] if runs[i].scheme == "plain"]
    sentence = head + (": " + listing([behind(i) for i in told]) if told else "") + "."
    return sentence + broken + _spread(runs)


def learning_rates(runs: Sequence[Run]) -> str:
    """The learning rate of each run in one sentence."""
    if len({run.lr for run in runs}) == 1:
        who = "Every run uses" if len(runs) > 1 else f"{run_labels(runs)[0]} uses"
        return f"{who} the learning rate {rate(runs[0].lr)}."
    parts = [f"{label} {rate(run.lr)}" for label, run in zip(run_labels(runs), runs, strict=True)]
    return f"Learning rates differ from run to run: {listing(parts)}."


def differences(runs: Sequence[Run]) -> list[str]:
    """One line per field, other than scheme and optimizer, in which the runs are not alike.

    Compared are every field of `data` (its number of workers apart) and `model`, `train.seed`, `train.steps`,
    `train.batch`, the tokens trained at the last evaluation, and whether that was by top-k.
    """
    flat = [_fair_fields(run) for run in runs]
    labels = run_labels(runs)
    lines = []
    for name in sorted(set().union(*flat)):
        values = [fields.get(name, "absent") for fields in flat]
        if len(set(values)) > 1:
            told = ", ".join(f"{label} {value}" for label, value in zip(labels, values, strict=True))
            lines.append(f"{name}: {told}")
    return lines


def _fair_fields(run: Run) -> dict[str, str]:
    fields = {
        **_flatten("data", run.config.get("data", {})),
        **_flatten("model", run.config["model"]),
        "tokens trained": f"{run.last_eval.tokens:,}",
        "judged": "by top-k, which looks at later tokens" if run.looks_ahead else "as sampled",
    }
    fields.pop("data.workers", None)  # the batches are the same
    train = run.config.get("train", {})
    return fields | {f"train.{key}": json.dumps(train[key]) for key in _TRAIN_FIELDS if key in train}


def _flatten(prefix: str, value: object) -> dict[str, str]:
    if isinstance(value, dict):
        return {k: v for key, inner in value.items() for k, v in _flatten(f"{prefix}.{key}", inner).items()}
    return {prefix: json.dumps(value)}


def _spread(runs: Sequence[Run]) -> str:
    """A caution where no scheme was run with two seeds: the gap has nothing to be measured against."""
    seeds: dict[str, set] = {}
    for run in runs:
        seeds.setdefault(run.scheme, set()).add(run.config.get("train", {}).get("seed"))
    if any(len(found) > 1 for found in seeds.values()):
        return ""
    return " One seed per scheme: how much of this is chance was not measured."
