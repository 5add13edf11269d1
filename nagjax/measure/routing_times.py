"""How much time and how many FLOPs Mixture-of-Depths saves in training."""

import dataclasses
import statistics
from pathlib import Path

import jax
from jax.sharding import Mesh

from nagjax.layers.platform import on_gpu
from nagjax.measure.step_times import Racer, blueprint_of, check_batch, race, record
from nagjax.mod import ModConfig
from nagjax.ranges import Count, Fraction, check_fields
from nagjax.runs.facts import model_costs, run_facts
from nagjax.train.abstract_step import abstract_batch
from nagjax.train.state import Blueprint
from nagjax.train.step import train_step


@dataclasses.dataclass(frozen=True)
class Routed:
    """A model to be timed with and without routing."""

    scheme: str = "nag"
    rate: Fraction = 0.5
    router: str = "auto"
    kv: str = "all"
    depth: Count = 24
    width: Count = 256
    batch: Count = 1
    context: Count = 1024
    rounds: Count = 5  # each round times both once, so that noise affects both
    steps: Count = 1  # steps in a row per round
    out: Path | None = None  # also write the result as JSON

    def __post_init__(self):
        check_fields(self)

    @property
    def slots(self) -> int:
        """The number of tokens of each row for which the model has room."""
        return self.context

    def blueprint(self, mod: ModConfig, depth: int | None = None) -> Blueprint:
        return blueprint_of(self.scheme, depth or self.depth, self.width, self.batch, self.slots, mod)

    @property
    def mod(self) -> ModConfig:
        return ModConfig(rate=(self.rate,), router=self.router, kv=self.kv)


@dataclasses.dataclass(frozen=True)
class RoutingTimes(Routed):
    """Time a routed training step against the dense one, and compare the time saved with the FLOPs saved."""

    def __post_init__(self):
        super().__post_init__()
        check_batch(self.batch)


def compared(times: dict[str, list[float]], flops: dict[str, float]) -> dict:
    """Milliseconds, the ratios of FLOPs and of time of "routed" to "dense", and the time saved as a share of the FLOPs
    saved, None if no FLOPs are saved. Times are medians over the rounds."""
    time_ratio = statistics.median(mine / base for mine, base in zip(times["routed"], times["dense"], strict=True))
    flops_ratio = flops["routed"] / flops["dense"]
    return {
        "milliseconds": {name: 1e3 * statistics.median(own) for name, own in times.items()},
        "flops_ratio": flops_ratio,
        "time_ratio": time_ratio,
        "time_saved_over_flops_saved": (1.0 - time_ratio) / (1.0 - flops_ratio) if flops_ratio < 1.0 else None,
    }


def told(result: dict) -> str:
    """The result of `compared`, in words."""
    share = result["time_saved_over_flops_saved"]
    if share is None:
        saved = "no FLOPs are saved"
    else:
        saved = f"{share:.0%} of the FLOPs saved is time saved" if share > 0.0 else "no time is saved"
    return f"FLOPs {result['flops_ratio']:.3f} x, time {result['time_ratio']:.3f} x dense: {saved}"


def compiled_flops(bench: RoutingTimes, mod: ModConfig) -> float:
    """XLA's FLOPs of one whole training step, extrapolated from compiled steps of one and two blocks: every further
    block costs the same. The scans of these steps are unrolled, since XLA counts a loop's body once."""
    one, two = (_unrolled(bench.blueprint(mod, depth)) for depth in (1, 2))
    return one + (bench.depth - 1) * (two - one)


def _unrolled(blueprint: Blueprint) -> float:
    first = blueprint.mesh.devices.ravel()[:1].reshape((1,) * blueprint.mesh.devices.ndim)
    single = dataclasses.replace(blueprint, mesh=Mesh(first, blueprint.mesh.axis_names))

    def step(state, batch):
        with jax.disable_jit():  # a scan becomes a loop in Python
            return train_step(single)(state, batch)

    return jax.jit(step).lower(single.abstract(), abstract_batch(single)).compile().cost_analysis()["flops"]


def routing_times(bench: RoutingTimes) -> dict:
    """Prints and returns the ratios of FLOPs and step time, and the time saved as a share of the FLOPs saved. FLOPs are
    XLA's count, on a GPU those of the formula."""
    mods = {"dense": ModConfig(), "routed": bench.mod}
    blueprints = {name: bench.blueprint(mod) for name, mod in mods.items()}  # refused before one is compiled
    racers = {name: Racer(blueprint, bench.batch, bench.context) for name, blueprint in blueprints.items()}
    times = race(racers, bench.rounds, bench.steps)
    tokens = bench.batch * bench.context
    flops = {name: tokens * model_costs(racer.blueprint).train for name, racer in racers.items()}
    counted, by = {"closed_form_ratio": flops["routed"] / flops["dense"]}, "by formula"
    if not on_gpu():  # there XLA does not count what libraries and kernels compute
        flops, by = {name: compiled_flops(bench, mod) for name, mod in mods.items()}, "XLA's count"
        counted |= {"compiled_flops": flops}
    result = counted | compared(times, flops)
    facts = run_facts(racers["routed"].blueprint)
    shape = f"{bench.depth} blocks x {bench.width}, {bench.batch} x {bench.context} tokens"
    print(f"{shape}, rate {bench.rate:g}, {facts['device']}")
    for name in mods:
        print(f"{name:8} {result['milliseconds'][name]:9.1f} ms  {flops[name]:.4g} FLOPs per step ({by})")
    print(told(result))
    return record("mod", bench, result, facts)
