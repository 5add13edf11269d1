"""What Mixture-of-Depths saves when a model reads prompts or writes new tokens, in time and in FLOPs."""

import dataclasses
import statistics
import time
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Float

from nagjax.data import batches, open_dataset
from nagjax.errors import UserError
from nagjax.generate import decode
from nagjax.generate.batching import NO_TOKEN
from nagjax.generate.choose import Sampling
from nagjax.generate.paths import paths
from nagjax.generate.weights import narrow_model
from nagjax.measure.routing_times import Routed, compared, told
from nagjax.measure.step_times import race, record
from nagjax.mod import ModConfig
from nagjax.mod.costs import costs
from nagjax.mod.routed import MoD
from nagjax.ranges import Count
from nagjax.runs.blueprint import ModelBlueprint, build_model
from nagjax.runs.facts import run_facts

GREEDY = Sampling(np.float32(0.0), np.int32(0), np.float32(1.0), np.float32(0.0))


@dataclasses.dataclass(frozen=True)
class SamplingTimes(Routed):
    """Time a routed model against the dense one while it reads a batch of whole contexts, or writes into its cache."""

    steps: Count = 16  # new tokens of each row per round of decode
    phase: Literal["prefill", "decode"] = "decode"

    def __post_init__(self):
        super().__post_init__()
        if self.written >= self.context:
            raise UserError("steps", self.steps, f"give fewer new tokens than the context of {self.context} has")

    @property
    def written(self) -> int:
        """Tokens of each row that are written, not read."""
        return self.steps if self.phase == "decode" else 0


class Racer:
    """A model with its cuts, and rows of which all but the last few tokens have been read."""

    def __init__(self, bench: SamplingTimes, mod: ModConfig, texts: np.ndarray):
        self.bench, self.texts = bench, texts
        self.blueprint = bench.blueprint(mod)
        self.graph, self.params = nnx.split(narrow_model(build_model(self.blueprint.config, seed=0)))
        self.given = decode.Pass(np.float32(1.0), self._cuts() if mod.active else None)
        self.lengths = np.full((bench.batch,), texts.shape[1] - bench.written, np.int32)
        self.rows = self._read()

    def _cuts(self):
        """As training leaves them: the mean cut of every sublayer, of the tokens that top-k chose."""
        seen = jax.jit(lambda p: nnx.merge(self.graph, p)(self.texts, progress=1.0).routing["cut"])
        return seen(self.params)

    def executed(self) -> np.ndarray:
        """Share of the timed tokens that run each sublayer, [L, 2], by the causal rule."""
        given = self.given.cuts, self.given.progress
        ran, _ = paths(self.params, self.texts, *given, graph=self.graph, causal=True)
        timed = slice(-self.bench.written or None, None)
        return np.asarray(ran)[:, :, timed].mean((1, 2)).reshape(-1, 2)

    def _read(self) -> decode.Rows:
        slots = self.bench.context
        return decode.read(self.params, self.texts, self.lengths, self.given, graph=self.graph, slots=slots, mesh=None)

    def seconds(self, passes: int) -> float:
        """Of one pass over all rows, mean of so many."""
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
        arguments = (self.lengths, done, keys, np.int32(0), limit, GREEDY, np.int32(NO_TOKEN), self.given)
        began = time.perf_counter()
        written, _ = decode.write(self.params, rows, *arguments, graph=self.graph, room=room, mesh=None)
        jax.block_until_ready(written)
        return time.perf_counter() - began


def sampling_times(bench: SamplingTimes) -> dict:
    """Prints, and returns, the ratios of FLOPs and time, and the time saved as a share of the FLOPs saved."""
    stream = batches(open_dataset(bench.blueprint(bench.mod).config.data), batch=bench.batch, context=bench.context)
    texts = np.asarray(next(iter(stream))["tokens"])
    racers = {name: Racer(bench, own, texts) for name, own in (("dense", ModConfig()), ("routed", bench.mod))}
    times = race(racers, bench.rounds, 1)
    executed = racers["routed"].executed()
    blueprints = {name: racer.blueprint for name, racer in racers.items()}
    flops = {"dense": forward_flops(blueprints["dense"]), "routed": forward_flops(blueprints["routed"], executed)}
    result = {"executed": float(executed.mean())} | compared(times, flops)
    facts = run_facts(racers["routed"].blueprint)
    what = f"{bench.context} tokens read" if bench.phase == "prefill" else f"{bench.steps} tokens written"
    print(f"{bench.depth} blocks x {bench.width}, {bench.batch} rows, {what} each, {facts['device']}")
    for name, milliseconds in result["milliseconds"].items():
        print(f"{name:8} {milliseconds:9.1f} ms  {flops[name]:.4g} FLOPs per token")
    print(f"{result['executed']:.1%} of the pairs of token and sublayer ran: {told(result)}")
    return record("mod", bench, result, facts)


def forward_flops(blueprint: ModelBlueprint, executed: Float[np.ndarray, "L 2"] | None = None) -> float:
    """Of a token that a cached pass computes: every query against a whole context of keys. `executed`: share of the
    tokens that run each sublayer; None: as the rates say."""
    model = blueprint.config.model
    rules = MoD.of(blueprint.config.scheme, model.mod, model.context)
    names = rules.router.name, rules.decider.name
    return costs(model, blueprint.parameters, *names, keys="computed", shares=executed).forward
