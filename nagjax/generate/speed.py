"""How fast a routed run generates, against the same parameters run densely."""

import time
from collections.abc import Sequence

from nagjax.generate.sample import generate
from nagjax.mod import ModConfig
from nagjax.runs.opening import OpenRun


def tokens_per_second(run: OpenRun, prompts: Sequence[str], tokens: int, rounds: int = 3) -> dict[str, float]:
    """New tokens per second over all prompts, greedily: `routed` by the run's causal decider, `dense` with every
    sublayer run for every token. The best of a few rounds that take turns, compilation left out."""
    ids = [row.tolist() for row in run.tokenizer.encode_batch(list(prompts))]
    ids = [row or [run.tokenizer.end_of_text] for row in ids]
    runs = {"routed": run, "dense": run.routed(ModConfig())}
    best = {}
    for round_ in range(rounds + 1):
        for name, own in runs.items():
            began = time.perf_counter()
            written = generate(
                own.model, ids, tokens=tokens, temperature=0.0, progress=own.progress, cuts=own.mod.get("cuts")
            )
            speed = sum(map(len, written)) / (time.perf_counter() - began)
            best[name] = max(best.get(name, 0.0), speed) if round_ else 0.0
    return best
