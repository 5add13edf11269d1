"""Step times of residual schemes, and compile times at two depths, always as ratios within one process."""

import dataclasses
import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

import jax
from jax.experimental.compilation_cache import compilation_cache

from nagjax.data import batches, open_dataset
from nagjax.errors import UserError, renamed
from nagjax.files import json_text, write_text
from nagjax.mod import ModConfig
from nagjax.model.config import ModelConfig
from nagjax.ranges import Count, check_each_once, check_fields
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig, TrainConfig
from nagjax.runs.facts import run_facts
from nagjax.train.abstract_step import abstract_batch
from nagjax.train.distributed.mesh import make_mesh
from nagjax.train.evaluator import put
from nagjax.train.facts import resolve
from nagjax.train.state import Blueprint
from nagjax.train.step import jit_train_step

DENSE = ModConfig()


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """Time whole training steps of several schemes against the first one."""

    schemes: tuple[str, ...] = ("plain", "lns", "review", "nag")
    depth: Count = 24
    width: Count = 256
    batch: Count = 4
    context: Count = 256
    rounds: Count = 7  # each round times every scheme once, so that noise affects all of them
    steps: Count = 2  # steps in a row per round
    out: Path | None = None  # also write the result as JSON

    def __post_init__(self):
        check_fields(self)
        _check_schemes(self.schemes)
        check_batch(self.batch)


def check_batch(batch: int) -> None:
    """Raises UserError for a batch that the devices cannot share."""
    if batch % len(jax.devices()):
        raise UserError("batch", batch, f"give a multiple of the {len(jax.devices())} devices")


def _check_schemes(schemes: Sequence[str]) -> None:
    check_each_once("schemes", schemes, "scheme")
    with renamed("scheme", "schemes"):
        for scheme in schemes:
            find_scheme(scheme)


class Racer:
    """A compiled training step with its own state and batch."""

    def __init__(self, blueprint: Blueprint, batch: int, context: int):
        self.blueprint = blueprint
        self.state, self.step = self.blueprint.create(), jit_train_step(self.blueprint)
        stream = batches(open_dataset(self.blueprint.config.data), batch=batch, context=context)
        self.batch = put(self.blueprint, next(iter(stream)))

    def seconds(self, steps: int) -> float:
        began = time.perf_counter()
        for _ in range(steps):
            self.state, metrics = self.step(self.state, self.batch)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - began) / steps


class Timed(Protocol):
    def seconds(self, steps: int) -> float: ...


def race(racers: Mapping[str, Timed], rounds: int, steps: int) -> dict[str, list[float]]:
    """Seconds per step of each racer, by round. The racers alternate, after a warm-up of two steps each."""
    for racer in racers.values():
        racer.seconds(2)
    times = {name: [] for name in racers}
    for _ in range(rounds):
        for name, racer in racers.items():
            times[name].append(racer.seconds(steps))
    return times


def step_times(bench: StepTimes) -> dict:
    """Prints and returns milliseconds per step and the ratio to the first scheme (median over rounds)."""
    shape = (bench.depth, bench.width, bench.batch, bench.context)
    racers = {name: Racer(blueprint_of(name, *shape), bench.batch, bench.context) for name in bench.schemes}
    times = race(racers, bench.rounds, bench.steps)
    first = times[bench.schemes[0]]
    rows = {
        name: {
            "milliseconds": 1e3 * statistics.median(own),
            "ratio": statistics.median(mine / base for mine, base in zip(own, first, strict=True)),
        }
        for name, own in times.items()
    }
    facts = run_facts(racers[bench.schemes[0]].blueprint)
    print(f"{bench.depth} blocks x {bench.width}, {bench.batch} x {bench.context} tokens, {facts['device']}")
    for name, row in rows.items():
        print(f"{name:16} {row['milliseconds']:9.1f} ms  {row['ratio']:.3f} x {bench.schemes[0]}")
    print(f"medians over {bench.rounds} rounds; a ratio is of two times of the same round")
    return record("step", bench, rows, facts)


@dataclasses.dataclass(frozen=True)
class CompileTimes:
    """Time tracing and compiling one training step at two depths: scanned layers should make both take equally long."""

    schemes: tuple[str, ...] = ("plain", "nag")
    shallow: Count = 12
    deep: Count = 96
    width: Count = 64
    batch: Count = 4
    context: Count = 128
    rounds: Count = 3
    out: Path | None = None

    def __post_init__(self):
        check_fields(self)
        _check_schemes(self.schemes)
        check_batch(self.batch)
        if self.deep <= self.shallow:
            raise UserError("deep", self.deep, f"give more than the {self.shallow} blocks of --shallow")


def compile_times(bench: CompileTimes) -> dict:
    """Prints and returns the seconds of tracing and compiling at both depths, and their ratio (median over rounds)."""
    rows, facts = {}, None
    for name in bench.schemes:
        seconds = {bench.shallow: [], bench.deep: []}
        for _ in range(bench.rounds):
            for depth, own in seconds.items():
                blueprint = blueprint_of(name, depth, bench.width, bench.batch, bench.context)
                facts = facts or run_facts(blueprint)
                own.append(compiled_anew(blueprint)[0])
        shallow, deep = (statistics.median(own) for own in seconds.values())
        rows[name] = {"shallow_seconds": shallow, "deep_seconds": deep, "ratio": deep / shallow}
        times = f"{bench.shallow} blocks {shallow:.2f} s   {bench.deep} blocks {deep:.2f} s"
        print(f"{name:16} {times}   {deep / shallow:.2f} x")
    return record("compile", bench, rows, facts)


def compiled_anew(blueprint: Blueprint) -> tuple[float, jax.stages.Compiled]:
    """Seconds of tracing and compiling the training step, and the program. The caches in memory and on disk are emptied
    or turned off first."""
    folder = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()  # otherwise jax keeps using the folder that it has opened
    jax.clear_caches()
    try:
        began = time.perf_counter()
        program = jit_train_step(blueprint).lower(blueprint.abstract(), abstract_batch(blueprint)).compile()
        return time.perf_counter() - began, program
    finally:
        jax.config.update("jax_compilation_cache_dir", folder)
        compilation_cache.reset_cache()


def blueprint_of(scheme: str, depth: int, width: int, batch: int, context: int, mod: ModConfig = DENSE) -> Blueprint:
    """The blueprint of a model of this shape on the built-in corpus, on all devices."""
    model = ModelConfig(depth=depth, width=width, context=context, mod=mod)
    config = resolve(RunConfig(find_scheme(scheme)(), model, train=TrainConfig(steps=10_000, batch=batch)))
    return Blueprint.of(config, make_mesh(config.mesh))


def record(name: str, bench, rows: dict, facts: dict) -> dict:
    """The result with the device, versions and settings of the measurement. If `bench.out` is given, it is also written
    there; the file's folder must exist."""
    origin = {key: facts[key] for key in ("device", "devices", "cpu", "versions", "commit", "date")}
    options = {key: value for key, value in dataclasses.asdict(bench).items() if key != "out"}
    result = {"bench": name, **options, "results": rows, **origin}
    if bench.out:
        write_text(bench.out, json_text(result, indent=2))
    return result
