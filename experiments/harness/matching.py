"""Fair baselines: configs with the same number of parameters, the same training FLOPs, or the same time."""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Mapping, Sequence

import jax

from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.measure.step_times import Racer, race
from nagjax.runs.config import MeshConfig, OptimizerConfig, RunConfig, TrainConfig
from nagjax.runs.facts import model_costs, parameters_by_part
from nagjax.train.distributed.mesh import make_mesh
from nagjax.train.facts import resolve as with_vocabulary
from nagjax.train.state import Blueprint


@functools.lru_cache(64)
def blueprint_of(config: RunConfig) -> Blueprint:
    return Blueprint.of(with_vocabulary(config), make_mesh(MeshConfig(data=1), jax.devices()[:1]))


def parameters(config: RunConfig) -> int:
    return sum(parameters_by_part(blueprint_of(_counted(config))).values())


def train_flops_per_token(config: RunConfig) -> float:
    """FLOPs of the forward and the backward pass, without what Mixture-of-Depths skips."""
    return model_costs(blueprint_of(_counted(config))).train


def _counted(config: RunConfig) -> RunConfig:
    """A config that is equal for all runs of one model, however they are trained, and in whatever order they read the
    text."""
    data = dataclasses.replace(config.data, seed=DataConfig().seed)
    return dataclasses.replace(config, optimizer=OptimizerConfig(), train=TrainConfig(), data=data)


def train_flops(config: RunConfig) -> float:
    """Training FLOPs of the whole run."""
    return config.train.steps * config.train.batch * config.model.context * train_flops_per_token(config)


def with_steps(config: RunConfig, steps: int) -> RunConfig:
    return dataclasses.replace(config, train=dataclasses.replace(config.train, steps=max(int(steps), 1)))


def with_flops(config: RunConfig, budget: float) -> RunConfig:
    """The config with the number of steps that comes nearest to a budget of training FLOPs."""
    return with_steps(config, round(budget / train_flops(with_steps(config, 1))))


def step_seconds(configs: Mapping[str, RunConfig], rounds: int = 9, steps: int = 1) -> dict[str, list[float]]:
    """Seconds per training step of each config, by round. In every round each config takes `steps` steps in a row, so
    that other load on the machine affects all configs alike."""
    racers = {
        name: Racer(blueprint_of(config), config.train.batch, config.model.context) for name, config in configs.items()
    }
    return race(racers, rounds, steps)


def ratio(times: Sequence[float], others: Sequence[float]) -> float:
    """The ratio of two columns of `step_seconds`: the median over the rounds."""
    return statistics.median(own / other for own, other in zip(times, others, strict=True))


def widened(config: RunConfig, reaches: Callable[[RunConfig], float], target: float) -> RunConfig:
    """The config widened by one unit per head at a time (two with rotary positions) until `reaches(config)` is at least
    `target`: the rule by which arXiv:2606.31859 matches parameters. Derived sizes are adjusted.

    Raises UserError if eight times the width is not enough.
    """
    model = config.model
    unit = model.heads * (2 if model.positions == "rotary" else 1)
    for width in range(model.width, 8 * model.width, unit):
        kv_heads = None if model.kv_heads == model.heads else model.kv_heads
        moe = dataclasses.replace(model.moe, hidden=None)
        wider = dataclasses.replace(model, width=width, kv_heads=kv_heads, hidden=None, moe=moe)
        candidate = dataclasses.replace(config, model=wider)
        if reaches(candidate) >= target:
            return candidate
    raise UserError("width", model.width, f"no width up to {8 * model.width} reaches {target:.3g}")
