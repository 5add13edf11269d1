"""Trains models of several schemes at one shape with default learning rates, and measures them."""

import dataclasses
from collections.abc import Callable
from pathlib import Path

from experiments.harness.jobs import Training, looked_at, seeded
from nagjax.data import DataConfig
from nagjax.model.config import ModelConfig
from nagjax.ranges import Count, Natural
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig


@dataclasses.dataclass(frozen=True)
class Settings:
    depth: Count
    width: Count
    context: Count
    batch: Count
    steps: Count
    seeds: Natural
    schemes: tuple[str, ...] = ("plain", "lns", "review", "nag")
    eval_batches: Count = 24
    data: str = "stdlib"  # or a folder made by nagjax data prepare


def trainings(settings: Settings, measure: Callable[[Path], dict]) -> list[Training]:
    """One training for each scheme and each of the seeds 0, 1, ...; `measure` reads the folder of the trained model."""
    return [
        Training(f"{scheme}-s{seed}", {"scheme": scheme, "seed": seed}, _config(settings, scheme, seed), measure)
        for seed in range(settings.seeds)
        for scheme in settings.schemes
    ]


def _config(settings: Settings, scheme: str, seed: int) -> RunConfig:
    model = ModelConfig(depth=settings.depth, width=settings.width, context=settings.context)
    train = looked_at(settings.steps, settings.batch, settings.eval_batches, times=4)
    return seeded(RunConfig(find_scheme(scheme)(), model, train=train, data=DataConfig(path=settings.data)), seed)
