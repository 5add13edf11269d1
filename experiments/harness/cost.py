"""Estimates what a size of a recipe would take on the machine it is meant for, if it has not run yet.

FLOPs are those of the models, in closed form, forward and backward. The speed of a machine is assumed: `HALF` of the
MFU that the compiled step of a model of that width reaches at its roofline bound (`benchmarks.experiment_costs`), but
at most `MOST` of the peak. Each grid of rates is assumed to widen by one factor. Evaluations, saves, and jobs that
train no language model are not included.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

from experiments.harness.jobs import Job
from experiments.harness.matching import train_flops_per_token
from experiments.harness.rates import Tuning
from nagjax.plan.bill import ASSUMED_MFU as MOST
from nagjax.runs.config import RunConfig

HALF = 0.5


class Machine(NamedTuple):
    """`start`: the assumed number of seconds until a run's first step; `limit`: the hours that a size may take."""

    topology: str
    flops: float  # of all its chips, FLOP/s
    start: float
    limit: float


class Cost(NamedTuple):
    """The cost of a plan; `least` and `most` are the tokens of its shortest and longest run."""

    runs: int
    tokens: int
    least: int
    most: int
    flops: float
    hours: float


def _trained(jobs: Sequence[Job]) -> list[RunConfig]:
    """The language models that a plan trains."""
    tunings = [job for job in jobs if isinstance(job, Tuning)]
    found = [getattr(job, "run_config", None) or getattr(job, "how", None) for job in jobs]
    return [config for config in found if config is not None] + [one.trial(1.0).run_config for one in tunings]


def cost(jobs: Sequence[Job], machine: Machine, highest_mfu: Callable[[int], float]) -> Cost:
    """The cost of these jobs. highest_mfu: the MFU that a step of a given width can reach on the machine, as a share of
    the peak."""
    configs = _trained(jobs)
    tokens = [config.train.steps * config.train.batch * config.model.context for config in configs]
    flops = [count * _per_token(config.scheme, config.model) for count, config in zip(tokens, configs, strict=True)]
    rates = [machine.flops * min(HALF * highest_mfu(config.model.width), MOST) for config in configs]
    seconds = sum(machine.start + own / rate for own, rate in zip(flops, rates, strict=True))
    return Cost(len(configs), sum(tokens), min(tokens, default=0), max(tokens, default=0), sum(flops), seconds / 3600)


@functools.cache
def _per_token(scheme, model) -> float:
    return train_flops_per_token(RunConfig(scheme, model))
