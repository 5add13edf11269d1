"""Jobs that measure existing models: runs, and models that `nagjax import` can read."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nagjax.data.pipeline import STDLIB
from nagjax.interop.load import load
from nagjax.runs.opening import OpenRun

MODELS = ("plain-24", "lns-24", "review-24", "nag-24", "nag_harmonic-24")  # in the folder models/


@dataclasses.dataclass(frozen=True)
class Look:
    """A job that measures one model. asked: the settings on which the measurement depends."""

    name: str
    labels: dict[str, Any]
    asked: dict[str, Any]
    measure: Callable[[OpenRun], dict[str, Any]]

    def config(self) -> dict[str, Any]:
        return self.labels | self.asked

    def run(self, folder: Path) -> dict[str, Any]:
        return self.measure(load(self.labels["run"]))


def looks(runs: Sequence[str], asked: dict[str, Any], measure: Callable[[OpenRun], dict[str, Any]]) -> list[Look]:
    return [Look(f"{i}-{Path(run).name}", {"run": run}, asked, measure) for i, run in enumerate(runs)]


def named_corpus(data: str) -> str | None:
    """The corpus that settings name; None if each model's own is meant."""
    return None if data == STDLIB else data


def rounded(values: Any, digits: int = 6) -> list:
    """Values for JSON, rounded to `digits` decimals."""
    return np.round(np.asarray(values, np.float64), digits).tolist()
