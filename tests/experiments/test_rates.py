"""The grid widens until its best is inside; fresh seeds go on at that rate."""

import contextlib
import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import ClassVar

import pytest

from experiments.harness import rates
from experiments.harness.jobs import Record
from experiments.harness.rates import AtBest, Tried, Tuning, at_edge, best, missing
from experiments.harness.sweep import work
from nagjax.runs.lock import WriterLock


def test_where_to_look_next():
    assert missing({0.5: 2.0, 1.0: 1.9, 2.0: 2.1}, 2.0, 64) is None
    assert missing({0.5: 2.2, 1.0: 2.1, 2.0: 2.0}, 2.0, 64) == 4.0
    assert missing({0.5: 2.0, 1.0: 2.1, 2.0: 2.2}, 2.0, 64) == 0.25
    assert missing({0.5: 2.2, 1.0: 2.0, 2.0: None}, 2.0, 64) is None  # what diverged is a neighbour
    assert missing({0.5: None, 1.0: None, 2.0: None}, 2.0, 64) == 0.25
    assert missing({0.5: 2.2, 1.0: 2.1, 2.0: 2.0}, 2.0, 2.0) is None and at_edge({0.5: 2.2, 1.0: 2.1, 2.0: 2.0})
    assert best({1.0: None}) is None and not at_edge({1.0: 2.0})
    assert at_edge({0.5: None, 1.0: None}), "it was never trained: no seed of it is evidence"


@dataclasses.dataclass(frozen=True)
class Fake:
    """A stand-in for training: the loss is a parabola in the rate's logarithm, best at 8; above 16 it diverges."""

    factor: float
    seed: int = 0

    @property
    def name(self):
        return f"x{self.factor:g}-s{self.seed}"

    @property
    def labels(self):
        return {"seed": self.seed} | ({"factor": self.factor} if self.seed == 0 else {})

    def config(self):
        return {"factor": self.factor}

    def run(self, folder: Path) -> dict:
        with (folder.parent / "ran").open("a") as log:
            log.write(f"{self.name} ")
        return {"loss": None if self.factor > 16 else 2 + math.log2(self.factor / 8) ** 2 + 0.01 * self.seed}


def test_how_far_a_grid_may_miss_the_best_rate():
    """Of losses that are a parabola in the rate's logarithm: its minimum, wherever the grid lies."""
    loss = lambda factor, lowest: 2.0 + 0.3 * math.log(factor / lowest) ** 2  # noqa: E731
    tried = lambda lowest, *factors: Tried({f: loss(f, lowest) for f in factors})  # noqa: E731
    assert tried(1.0, 0.5, 1.0, 2.0).grid_error == pytest.approx(0.0, abs=1e-12)
    for lowest in (0.8, 1.3):
        assert tried(lowest, 0.25, 0.5, 1.0, 3.0).grid_error == pytest.approx(loss(1.0, lowest) - 2.0)
    assert tried(1.0, 1.0, 2.0, 4.0).grid_error is None and Tried({1.0: None}).grid_error is None
    assert Tried({0.5: 2.1, 1.0: 2.0, 2.0: None}).grid_error is None


def test_a_tuning_widens_its_grid_and_a_fresh_seed_takes_the_best(tmp_path):
    tuning = Tuning("rate", {}, Fake, (0.5, 1.0, 2.0), 64)
    fresh = AtBest("s1", {"seed": 1}, tuning, lambda factor: Fake(factor, 1))
    (record,) = rates.awaited([fresh], tmp_path)
    assert record.metrics == {"loss": pytest.approx(2.01), "factor": 8.0}
    assert (tmp_path / "ran").read_text().split() == ["x0.5-s0", "x1-s0", "x2-s0", "x4-s0", "x8-s0", "x16-s0", "x8-s1"]
    (tuned,) = rates.awaited([tuning], tmp_path)  # read, not done again
    tried = Tried.of([tuned])
    assert (tried.factor, tried.edge) == (8.0, False) and len(tried.losses) == 6
    assert set(tuned.metrics["widened"]) == {"4", "8", "16"}


def test_while_another_process_is_at_a_trial_other_jobs_are_done(tmp_path):
    tuning = Tuning("rate", {}, Fake, (1.0, 2.0), 1.0)
    fresh = [AtBest(f"s{seed}", {}, tuning, lambda factor, seed=seed: Fake(factor, seed)) for seed in (1, 2)]
    with contextlib.ExitStack() as others:
        others.enter_context(WriterLock(tmp_path / "x1-s0" / "held", "test"))
        work([*fresh, tuning, Released("free", others.close)], tmp_path)
    assert (tmp_path / "ran").read_text().split() == ["free", "x1-s0", "x2-s0", "x2-s1", "x2-s2"]


@dataclasses.dataclass(frozen=True)
class Released:
    """The other process ends while this job is done."""

    name: str
    release: Callable[[], None]
    labels: ClassVar[dict] = {}

    def config(self):
        return {}

    def run(self, folder: Path) -> dict:
        self.release()
        (folder.parent / "ran").write_text(f"{self.name} ")
        return {}


@dataclasses.dataclass(frozen=True)
class Broken(Fake):
    def run(self, folder: Path) -> dict:
        return {"loss": None}


def test_an_arm_that_diverges_at_all_rates_is_told(tmp_path):
    tuning = Tuning("rate", {}, Broken, (0.5, 1.0), 1.0)
    (record,) = rates.awaited([AtBest("s1", {"seed": 1}, tuning, lambda factor: Fake(factor, 1))], tmp_path)
    assert record.metrics["loss"] is None and record.metrics["factor"] is None
    assert Tried.of([Record("", {"factor": 1.0, "seed": 0}, {}, {"loss": None})]).loss == math.inf
