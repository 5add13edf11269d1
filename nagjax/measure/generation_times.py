"""How fast a run generates text, and how much of it skipping saves, in time and in FLOPs."""

import dataclasses
import time
from collections.abc import Sequence

import numpy as np
from flax import nnx

from nagjax.generate.batching import slots_of
from nagjax.generate.paths import paths
from nagjax.generate.sample import generate
from nagjax.measure.routing_times import compared
from nagjax.measure.step_times import race
from nagjax.mod import ModConfig
from nagjax.runs.facts import model_costs
from nagjax.runs.opening import OpenRun


@dataclasses.dataclass(frozen=True)
class Generation:
    """Prompts of token ids, which a model continues greedily."""

    run: OpenRun
    prompts: list[list[int]]
    tokens: int

    @property
    def slots(self) -> int:
        """The number of tokens for which the cache has room; every query is multiplied with as many keys."""
        return slots_of(max(map(len, self.prompts)), self.tokens, self.run.config.model.context)

    def written(self) -> list[list[int]]:
        run = self.run
        options = {"progress": run.progress, "cuts": run.mod.get("cuts")}
        return generate(run.model, self.prompts, tokens=self.tokens, temperature=0.0, **options)

    def seconds(self, passes: int) -> float:
        """Seconds of one generation, mean over `passes`."""
        began = time.perf_counter()
        for _ in range(passes):
            self.written()
        return (time.perf_counter() - began) / passes

    def executed(self) -> np.ndarray:
        """The share of the tokens, of prompts and of new text, that run each sublayer, [L, 2], by the run's causal
        decider. The last token of a row is written but not read, and does not count."""
        rows = [(prompt + new)[:-1] for prompt, new in zip(self.prompts, self.written(), strict=True)]
        lengths = np.array(list(map(len, rows)))
        texts = np.zeros((len(rows), lengths.max()), np.int32)
        for text, row in zip(texts, rows, strict=True):
            text[: len(row)] = row
        graph, params = nnx.split(self.run.model)
        cuts, progress = self.run.mod.get("cuts"), np.float32(self.run.progress)
        ran, _ = paths(params, texts, cuts, progress, graph=graph, causal=True)
        read = np.arange(texts.shape[1]) < lengths[:, None]
        return np.asarray(ran)[:, read].mean(1).reshape(-1, 2)


def generation_times(run: OpenRun, prompts: Sequence[str], tokens: int, rounds: int = 3) -> dict:
    """Times the greedy continuation of prompts by `tokens` new tokens: by the run as it is and, if its tokens skip
    sublayers, by the same parameters with all sublayers run. The two take turns in `rounds`; compilation is left out.

    Returns `tokens_per_second` over all rows, for "routed" and "dense" (the median round). With Mixture-of-Depths it
    also returns `executed`, the share of the (token, sublayer) pairs that ran, and the result of `compared` on time and
    on forward FLOPs (counted as if every query, also of the prompts, met all slots of the cache).
    """
    read = [[*run.beginning, *row.tolist()] for row in run.tokenizer.encode_batch(list(prompts))]
    ids = [row or [run.tokenizer.end_of_text] for row in read]
    runs = {"dense": run.routed(ModConfig())} | ({"routed": run} if run.config.model.mod.active else {})
    racers = {name: Generation(own, ids, tokens) for name, own in runs.items()}
    times = race(racers, rounds, 1)
    result = {"tokens_per_second": {name: tokens * len(ids) / float(np.median(own)) for name, own in times.items()}}
    if "routed" not in racers:
        return result
    executed, slots = racers["routed"].executed(), racers["routed"].slots
    shares = {"dense": None, "routed": executed}
    flops = {name: model_costs(own.blueprint, slots=slots, shares=shares[name]).forward for name, own in runs.items()}
    return result | {"executed": float(executed.mean())} | compared(times, flops)
