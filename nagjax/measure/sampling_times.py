"""How much time and how many FLOPs Mixture-of-Depths saves when a model reads prompts or writes new tokens."""

import dataclasses
import statistics
import time
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Int

from nagjax.data import batches, open_dataset
from nagjax.generate import decode
from nagjax.generate.batching import NOTHING_ENDS
from nagjax.generate.choose import Sampling
from nagjax.generate.paths import paths
from nagjax.generate.weights import narrow_model
from nagjax.measure.routing_times import Routed, compared, told
from nagjax.measure.step_times import race, record
from nagjax.mod import ModConfig
from nagjax.ranges import Count
from nagjax.runs.blueprint import build_model
from nagjax.runs.facts import model_costs, run_facts

GREEDY = Sampling(np.float32(0.0), np.int32(0), np.float32(1.0), np.float32(0.0))


@dataclasses.dataclass(frozen=True)
class SamplingTimes(Routed):
    """Time a routed model against the dense one while it reads a batch of whole contexts, or writes into its cache."""

    steps: Count = 16  # new tokens of each row per round of decode, behind `context` tokens that were read
    phase: Literal["prefill", "decode"] = "decode"

    @property
    def slots(self) -> int:
        """The number of tokens of each row: those that are read and those that are written."""
        return self.context + (self.steps if self.phase == "decode" else 0)


class Racer:
    """A model with its cuts, and rows whose tokens have been read up to those to be written."""

    def __init__(self, bench: SamplingTimes, mod: ModConfig, texts: np.ndarray):
        self.bench, self.texts = bench, texts
        self.blueprint = bench.blueprint(mod)
        self.graph, self.params = nnx.split(narrow_model(build_model(self.blueprint.config, seed=0)))
        self.given = decode.Pass(np.float32(1.0), self._cuts() if mod.active else None)
        self.lengths = np.full((bench.batch,), bench.context, np.int32)
        self.rows = self._read()
        self.written: Int[np.ndarray, "B steps"] | None = None  # the tokens of the last pass that wrote

    def _cuts(self):
        """The mean cut of every sublayer from top-k on these texts, as training would leave it."""
        seen = jax.jit(lambda p: nnx.merge(self.graph, p)(self.texts, progress=1.0).routing["cut"])
        return seen(self.params)

    def executed(self) -> np.ndarray:
        """The share of the tokens which `seconds` has timed, read or written, that run each sublayer, [L, 2], by the
        causal rule."""
        texts, first = self.texts, 0
        if self.written is not None:
            first = self.bench.context
            texts = np.concatenate([texts[:, :first], self.written], axis=1)
        given = self.given.cuts, self.given.progress
        ran, _ = paths(self.params, texts, *given, graph=self.graph, causal=True)
        return np.asarray(ran)[:, :, first:].mean((1, 2)).reshape(-1, 2)

    def _read(self) -> decode.Rows:
        static = {"graph": self.graph, "slots": self.bench.slots, "mesh": None}
        return decode.read(self.params, self.texts, self.lengths, self.given, **static)

    def seconds(self, passes: int) -> float:
        """Seconds of one pass over all rows, mean over `passes`."""
        once = self._reading if self.bench.phase == "prefill" else self._writing
        return statistics.mean(once() for _ in range(passes))

    def _reading(self) -> float:
        began = time.perf_counter()
        jax.block_until_ready(self._read())
        return time.perf_counter() - began

    def _writing(self) -> float:
        rows = jax.block_until_ready(jax.tree.map(jnp.copy, self.rows))
        limit, room = np.int32(self.bench.steps), self.bench.steps
        done, keys = np.zeros(self.bench.batch, bool), np.zeros((self.bench.batch, 2), np.uint32)
        arguments = (self.lengths, done, keys, np.int32(0), limit, GREEDY, NOTHING_ENDS, self.given)
        began = time.perf_counter()
        written, _ = decode.write(self.params, rows, *arguments, graph=self.graph, room=room, mesh=None)
        jax.block_until_ready(written)
        took = time.perf_counter() - began
        self.written = np.asarray(written)
        return took


def sampling_times(bench: SamplingTimes) -> dict:
    """Prints and returns the ratios of FLOPs and time, and the time saved as a share of the FLOPs saved."""
    stream = batches(open_dataset(bench.blueprint(bench.mod).config.data), batch=bench.batch, context=bench.slots)
    texts = np.asarray(next(iter(stream))["tokens"])
    racers = {name: Racer(bench, own, texts) for name, own in (("dense", ModConfig()), ("routed", bench.mod))}
    times = race(racers, bench.rounds, 1)
    executed = racers["routed"].executed()
    shares = {"dense": None, "routed": executed}
    flops = {
        name: model_costs(racer.blueprint, slots=bench.slots, shares=shares[name]).forward
        for name, racer in racers.items()
    }
    result = {"executed": float(executed.mean())} | compared(times, flops)
    facts = run_facts(racers["routed"].blueprint)
    what = f"{bench.context} tokens of each read"
    what = what if bench.phase == "prefill" else f"{bench.steps} tokens of each written behind {bench.context}"
    print(f"{bench.depth} blocks x {bench.width}, {bench.batch} rows, {what}, {facts['device']}")
    for name, milliseconds in result["milliseconds"].items():
        print(f"{name:8} {milliseconds:9.1f} ms  {flops[name]:.4g} FLOPs per token")
    print(f"{result['executed']:.1%} of the pairs of token and sublayer ran: {told(result)}")
    return record("mod", bench, result, facts)
