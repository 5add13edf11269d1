"""Questions whose answers need depth: does more depth compute, or only average?

Claim: NAG's extra depth computes: on questions of many sequential steps it gains more from depth than plain pre-norm.
Source: this project's question to Figliolia & Millidge 2026, arXiv:2606.16112; S5 word problems: Barrington 1989
Expected: accuracy at many hops rises with depth for every scheme; the gain is larger for NAG (no figures published)
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: 8 GPUs or a TPU slice, one task per run
Time: smoke 12 s; cpu about 20 min with --processes 2; h200 and paper not measured
Command: python -m experiments.deep_compositional --processes 2

Two puzzles with exact answers, fresh questions at every step (harness/puzzles.py). Pointers: a permutation that is one
cycle is written down, then a start; the answer at the h-th place is where h hops lead, and no place is given the answer
of the place before. S5 words: at every letter the answer is the product of all letters so far. Only answers count in
the loss. A model is judged by its accuracy averaged over all hops; `reach` is how many hops in a row it answers with at
least 90%. All models have their schemes' default rates and at most three seeds, which decides nothing.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.harness.figures import look, panels, with_spread
from experiments.harness.jobs import Record, seeded
from experiments.harness.puzzles import Pointers, Puzzle, Solve, Words
from experiments.harness.results import Summary
from experiments.harness.statistics import mean_interval
from experiments.harness.verdicts import Gap, ahead_of_all
from nagjax.errors import UserError
from nagjax.model.config import ModelConfig
from nagjax.ranges import Count, Natural, Positive
from nagjax.residual import find_scheme
from nagjax.runs.config import OptimizerConfig, RunConfig, TrainConfig

SOLVED = 0.9
PLAIN, NAG = "plain", "nag"


@dataclasses.dataclass(frozen=True)
class Settings:
    depths: tuple[Count, ...]  # blocks
    width: Count
    batch: Count
    steps: Count
    seeds: Natural
    nodes: Count = 16  # pointers: tokens of the permutation
    hops: Count = 8  # pointers: answers of a question, the h-th of them h hops from its start
    letters: Count = 24  # S5 words
    puzzles: tuple[str, ...] = (
        Pointers.name,
        Words.name,
    )  # pointers: follow a permutation; S5 words: multiply permutations
    schemes: tuple[str, ...] = ("plain", "lns", "review", "nag")
    lr: Positive | None = None  # None: each scheme's default
    test_batches: Count = 16


SIZES = {
    "smoke": Settings((1,), 16, 8, 3, 1, 6, 3, puzzles=(Pointers.name,), schemes=("nag",), test_batches=1),
    "cpu": Settings((2, 4, 8), 64, 64, 500, 2, nodes=8, hops=4, letters=20),
    "h200": Settings((4, 16), 256, 256, 3600, 2, 48, 24, 64),
    "paper": Settings((4, 8, 16, 32), 512, 512, 20_000, 3, 96, 48, 128),
}


def _puzzles(settings: Settings) -> dict[str, Puzzle]:
    known = {Pointers.name: Pointers(settings.nodes, settings.hops), Words.name: Words(settings.letters)}
    if unknown := set(settings.puzzles) - set(known):
        raise UserError("puzzles", sorted(unknown), f"known: {', '.join(known)}")
    return {name: known[name] for name in settings.puzzles}


def plan(settings: Settings) -> list[Solve]:
    return [
        Solve(
            f"{name.replace(' ', '_')}-{scheme}-{depth}-s{seed}",
            {"puzzle": name, "scheme": scheme, "depth": depth, "seed": seed},
            seeded(_config(settings, puzzle, scheme, depth), seed),
            puzzle,
            settings.test_batches,
        )
        for seed in range(settings.seeds)
        for name, puzzle in _puzzles(settings).items()
        for depth in settings.depths
        for scheme in settings.schemes
    ]


def _config(settings: Settings, puzzle: Puzzle, scheme: str, depth: int) -> RunConfig:
    shape = {"context": puzzle.context, "vocab": puzzle.vocab, "positions": "learned"}
    model = ModelConfig(depth=depth, width=settings.width, **shape)
    train = TrainConfig(settings.steps, settings.batch)
    return RunConfig(find_scheme(scheme)(), model, OptimizerConfig(lr=settings.lr), train)


def reach(accuracy: Sequence[float]) -> int:
    """Hops in a row, from the first on, that are answered."""
    wrong = [hop for hop, share in enumerate(accuracy) if not share >= SOLVED]
    return wrong[0] if wrong else len(accuracy)


def _mean(records: Sequence[Record], puzzle: str, scheme: str, depth: int) -> dict[int, float]:
    """Accuracy over all hops, by seed."""
    return {r.labels["seed"]: float(np.mean(r.metrics["accuracy"])) for r in _of(records, puzzle, scheme, depth)}


def _of(records: Sequence[Record], puzzle: str, scheme: str, depth: int) -> list[Record]:
    wanted = {"puzzle": puzzle, "scheme": scheme, "depth": depth}
    return [r for r in records if wanted.items() <= r.labels.items()]


def _gain(settings: Settings, records: Sequence[Record], puzzle: str, scheme: str) -> dict[int, float]:
    """By seed: accuracy of the deepest model minus the shallowest's."""
    deep, shallow = (_mean(records, puzzle, scheme, f(settings.depths)) for f in (max, min))
    return {seed: deep[seed] - shallow[seed] for seed in deep.keys() & shallow.keys()}


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    rows, told, more = [], [], []
    for puzzle in settings.puzzles:
        for scheme in settings.schemes:
            for depth in settings.depths:
                own = _of(records, puzzle, scheme, depth)
                row = {"puzzle": puzzle, "scheme": scheme, "blocks": depth}
                accuracy = mean_interval(list(_mean(records, puzzle, scheme, depth).values()))
                hops = float(np.mean([reach(r.metrics["accuracy"]) for r in own]))
                rows.append(row | {"accuracy": accuracy.text(3), "reach": hops})
        gains = {scheme: _gain(settings, records, puzzle, scheme) for scheme in settings.schemes}
        listed = ", ".join(f"{s} {mean_interval(list(own.values())).estimate:+.3f}" for s, own in gains.items())
        told.append(f"{puzzle}, accuracy gained from {min(settings.depths)} to {max(settings.depths)} blocks: {listed}")
        if {PLAIN, NAG} <= gains.keys():
            more.append(Gap.of(puzzle, gains[NAG], gains[PLAIN]))
            told[-1] += f" (NAG minus plain {more[-1].interval.text(3)})"
    least = min(more, key=lambda gap: gap.interval.estimate, default=None)
    head = f"accuracy NAG gains more than plain on {least.name}: {least}" if least else ""
    return Summary("; ".join(told), ahead_of_all(more), rows, headline=head)


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    figure, axes = panels(2 * len(settings.puzzles), "What depth computes")
    for i, puzzle in enumerate(settings.puzzles):
        by_depth, by_hops = axes[2 * i : 2 * i + 2]
        for scheme in settings.schemes:
            values = [list(_mean(records, puzzle, scheme, depth).values()) for depth in settings.depths]
            with_spread(by_depth, settings.depths, values, **look(scheme), label=scheme)
            for depth, line in ((min(settings.depths), ":"), (max(settings.depths), "-")):
                own = [r.metrics["accuracy"] for r in _of(records, puzzle, scheme, depth)]
                accuracy = np.mean(own, axis=0)
                by_hops.plot(
                    1 + np.arange(len(accuracy)),
                    accuracy,
                    line,
                    color=look(scheme)["color"],
                    label=f"{scheme}, {depth}",
                )
        by_depth.set_title(f"{puzzle}: all hops")
        by_depth.set_xlabel("blocks")
        by_depth.set_ylabel("share of right answers")
        by_hops.set_title(f"{puzzle}: by hops, shallowest and deepest")
        by_hops.set_xlabel("hops")
        by_hops.legend(frameon=False, fontsize=7)
    axes[0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
