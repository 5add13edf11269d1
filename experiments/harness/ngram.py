"""The n-gram floor: the loss of byte (or token) n-gram tables, made from the same training text, on the same
evaluation.

A Transformer whose loss is not below it has learned nothing that needs depth.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from experiments.harness.jobs import TEXT
from nagjax.data import DataConfig, Dataset, batches, open_dataset
from nagjax.runs.config import RunConfig

ORDERS = (2, 3, 4, 5)
JUDGED_ORDER = 4  # losses above this table's do not count (harness/verdicts.py)


@dataclasses.dataclass(frozen=True)
class Text:
    """The targets that count, and for each the tokens before it in its row and document, the nearest first."""

    targets: Int[np.ndarray, " N"]
    before: Int[np.ndarray, "N longest"]
    known: Int[np.ndarray, " N"]  # the number of valid entries in `before`

    @classmethod
    def of(cls, rows: Iterable[dict[str, np.ndarray]], longest: int) -> "Text":
        """Made from batches of the input pipeline."""
        found = []
        for batch in rows:
            tokens, counts = batch["tokens"], batch["weights"] > 0
            shifted = [np.pad(tokens, ((0, 0), (k, 0)))[:, : tokens.shape[1]] for k in range(longest)]
            known = np.minimum(batch["positions"] + 1, longest)
            found.append((batch["targets"][counts], np.stack(shifted, -1)[counts], known[counts]))
        return cls(*(np.concatenate(parts).astype(np.int64) for parts in zip(*found, strict=True)))


def losses(trained: Text, judged: Text, vocab: int, orders: Sequence[int] = ORDERS) -> dict[int, float]:
    """Mean nats per target of `judged` under interpolated n-gram tables of `trained`, by order n:

        P_n(w | c) = (count(c w) + kinds(c) P_(n-1)(w | c')) / (count(c) + kinds(c))

    kinds(c): how many different tokens follow c; c': c without its first token; P_0 = 1/vocab. Witten & Bell 1991.
    Where less than n - 1 tokens stand before a target, the longest table that applies is asked.
    """
    probability, found = np.full(len(judged.targets), 1.0 / vocab), {}
    seen, asked = np.zeros(len(trained.targets), np.int64), np.zeros(len(judged.targets), np.int64)
    for length in range(max(orders)):
        own, other = trained.known >= length, (judged.known >= length) & (asked >= 0)
        if length:
            kinds, seen[own] = np.unique(_pairs(seen[own], trained.before[own, length - 1], vocab), return_inverse=True)
            asked[other] = _places(kinds, _pairs(asked[other], judged.before[other, length - 1], vocab))
            asked[judged.known < length] = -1
            other &= asked >= 0  # after an unknown context, only the shorter ones' estimate remains
        probability[other] = _interpolated(
            seen[own], trained.targets[own], asked[other], judged.targets[other], probability[other], vocab
        )
        if length + 1 in orders:
            found[length + 1] = float(-np.mean(np.log(probability)))
    return found


def _interpolated(seen, followed, asked, wanted, shorter, vocab: int) -> Float[np.ndarray, " N"]:
    continuations, count = np.unique(_pairs(seen, followed, vocab), return_counts=True)
    contexts = continuations // vocab
    size = int(seen.max()) + 1
    total, kinds = np.bincount(contexts, count, size)[asked], np.bincount(contexts, minlength=size)[asked]
    at = _places(continuations, _pairs(asked, wanted, vocab))
    return (np.where(at >= 0, count[at], 0) + kinds * shorter) / (total + kinds)


def _pairs(contexts, tokens, vocab: int) -> Int[np.ndarray, " N"]:
    return contexts * vocab + tokens


def _places(ordered: Int[np.ndarray, " K"], wanted: Int[np.ndarray, " N"]) -> Int[np.ndarray, " N"]:
    """The index of each value among the sorted ones; -1 if it is not there."""
    at = np.minimum(np.searchsorted(ordered, wanted), len(ordered) - 1)
    return np.where(ordered[at] == wanted, at, -1)


@dataclasses.dataclass(frozen=True)
class Floor:
    """A job: the n-gram losses of the text that runs with this data, seed and length read."""

    data: DataConfig
    context: int
    batch: int
    steps: int
    eval_batches: int

    @property
    def name(self) -> str:
        return f"ngram-{self.steps}x{self.batch}x{self.context}-e{self.eval_batches}-s{self.data.seed}"

    @property
    def labels(self) -> dict[str, Any]:
        return {"floor": True, "seed": self.data.seed}

    def config(self) -> dict[str, Any]:
        model, train = {"context": self.context}, {"batch": self.batch, "steps": self.steps}
        return {
            "data": dataclasses.asdict(self.data),
            "model": model,
            "train": train | {"eval_batches": self.eval_batches},
        }

    def run(self, folder: Path) -> dict[str, Any]:
        def text(split: str, count: int, repeat: bool) -> tuple[Text, Dataset]:
            dataset = open_dataset(self.data, split=split)
            rows = batches(dataset, batch=self.batch, context=self.context, repeat=repeat)
            return Text.of(itertools.islice(rows, count), max(ORDERS) - 1), dataset

        (trained, corpus), (judged, _) = text("train", self.steps, True), text("validation", self.eval_batches, False)
        found = losses(trained, judged, corpus.tokenizer.vocab_size)
        tables = {str(n): round(loss, 5) for n, loss in found.items()}
        return {"ngram": tables, "targets": len(judged.targets), TEXT: corpus.content}


KEY = ("data.path", "data.tokenizer", "data.seed", "model.context", "train.batch", "train.steps", "train.eval_batches")


def key(config: dict[str, Any]) -> tuple:
    """The part of a run's flat config that determines its floor. The names in a `Confirmation`'s config have those of
    its trials in front."""
    found = (next((v for full, v in config.items() if full == name or full.endswith(f".{name}")), None) for name in KEY)
    return tuple(found)


def floors(jobs: Sequence[Any]) -> list[Floor]:
    """One floor for every text that the jobs' runs read; jobs without a `run_config` read none."""
    configs = [config for job in jobs if (config := getattr(job, "run_config", None)) is not None]
    return list(dict.fromkeys(map(floor_of, configs)))


def floor_of(config: RunConfig) -> Floor:
    data, train = dataclasses.replace(config.data, workers=0), config.train
    return Floor(data, config.model.context, train.batch, train.steps, train.eval_batches)
