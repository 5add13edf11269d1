"""How far a result can be trusted: seeds, budget, n-gram floor, divergences; and the verdict that these allow."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from experiments.harness.jobs import TEXT, Record
from experiments.harness.ngram import JUDGED_ORDER, KEY, key
from experiments.harness.settings import brief
from experiments.harness.verdicts import UNTUNED, barred
from nagjax.runs.config import flatten


@dataclasses.dataclass(frozen=True)
class Evidence:
    """Facts about the runs that count: the trained ones, with fresh seeds if the recipe has any. Fields are None or
    empty in recipes that do not train on text."""

    seeds: int  # the smallest number of any arm and shape
    runs: int
    diverged: int  # of these runs
    trials_diverged: int  # of the runs at which rates were tried
    tokens: tuple[float, float] | None = None  # of one run: least and most
    tokens_per_parameter: tuple[float, float] | None = None
    # loss of each order's table, mean over seeds: of the text on which it is lowest, and highest
    ngram: dict[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    above_floor: int = 0  # shapes whose best arm is not below the 4-gram table of its text
    shapes: int = 0  # shapes that have a floor
    flags: tuple[str, ...] = ()


def evidence(records: Sequence[Record], floors: Sequence[Record], edges: Sequence[str] = ()) -> Evidence:
    trained = [record for record in records if "loss" in record.metrics]
    fresh = [record for record in trained if "factor" not in record.labels and "seed" in record.labels]
    trials = [record for record in trained if record not in fresh]
    widened = [run for record in records for run in record.metrics.get("widened", {}).values()]  # trials, too
    tried = [run["loss"] for run in [*(record.metrics for record in trials), *widened]]
    losses = [record.metrics["loss"] for record in fresh] or tried
    sound = [record for record in fresh or trials if record.metrics["loss"] is not None]
    costs = [r.metrics for r in sound if "tokens" in r.metrics and "parameters" in r.metrics]
    worse, shapes = _above(sound, floors)
    lost, lost_trials = losses.count(None), tried.count(None) if fresh else 0
    flags = ["one seed, on which rates were chosen"] if trials and not fresh else []
    flags += [UNTUNED] if trained and not trials else []
    flags += [f"edge: {len(edges)}"] if edges else []
    flags += [f"diverged: {lost} of {len(losses)}"] if lost else []
    flags += [f"trials diverged: {lost_trials} of {len(tried)}"] if lost_trials else []
    flags += [f"{'above' if worse else 'below'} {JUDGED_ORDER}-gram"] if shapes else []
    return Evidence(
        _seeds(fresh),
        len(losses),
        lost,
        lost_trials,
        _range([run["tokens"] for run in costs]),
        _range([float(f"{run['tokens'] / run['parameters']:.6g}") for run in costs]),
        _tables(floors),
        worse,
        shapes,
        tuple(flags),
    )


def _seeds(fresh: Sequence[Record]) -> int:
    """The smallest number of seeds of any arm at any shape; labels tell these apart."""
    found: dict[tuple, set[int]] = {}
    for record in fresh:
        others = tuple(sorted((name, str(value)) for name, value in record.labels.items() if name != "seed"))
        found.setdefault(others, set()).add(record.labels["seed"])
    return min(map(len, found.values()), default=0)


def _range(values: Sequence[float]) -> tuple[float, float] | None:
    return (min(values), max(values)) if values else None


def _tables(floors: Sequence[Record]) -> dict[str, tuple[float, float]]:
    texts: dict[tuple, list[dict[str, float]]] = {}
    for one in floors:
        named = dict(zip(KEY, key(flatten(one.config)), strict=True))
        texts.setdefault(tuple(_unseeded(named).values()), []).append(one.metrics["ngram"])
    mean = lambda tables, order: round(float(np.mean([table[order] for table in tables])), 4)  # noqa: E731
    orders = floors[0].metrics["ngram"] if floors else ()
    return {order: _range([mean(tables, order) for tables in texts.values()]) for order in orders}


def _above(sound: Sequence[Record], floors: Sequence[Record]) -> tuple[int, int]:
    """The number of shapes (told apart by label; without one by depth, width and steps) whose best run, on some seed,
    is not below the table of the very text that it has read; and the number of shapes with a table."""
    table = {key(flatten(f.config)): f.metrics["ngram"][str(JUDGED_ORDER)] for f in floors}
    margins: dict[tuple, dict[int | None, float]] = {}
    for record in sound:
        config = flatten(record.config)
        text = dict(zip(KEY, key(config), strict=True))
        steps = text["train.steps"]
        floor = record.metrics.get("ngram", {}).get(str(JUDGED_ORDER))  # measured with the run, for its own steps
        if floor is None and record.metrics.get("steps", steps) == steps:
            floor = table.get(tuple(text.values()))
        if floor is not None:
            labelled = record.labels.get("shape")
            shape = (labelled,) if labelled else (config.get("model.depth"), config.get("model.width"), steps)
            own, seed = margins.setdefault(shape, {}), text["data.seed"]
            own[seed] = min(own.get(seed, np.inf), record.metrics["loss"] - floor)
    return sum(max(own.values()) >= 0 for own in margins.values()), len(margins)


def concluded(summary: Any, records: Sequence[Record], floors: Sequence[Record]) -> Any:
    """The summary with its evidence; its verdict becomes undecided if `verdicts.barred` gives reasons. The summaries of
    recipes that train nothing (released tables) are unchanged. `within_one_model` in the details says that the claim
    compares only variants of one trained model, even if other models are shown beside it."""
    if not any("loss" in record.metrics for record in records):
        return summary
    edges = summary.details.get("at_the_grid_edge", [])
    found = evidence(records, floors, edges)
    tuned = UNTUNED not in found.flags or summary.details.get("within_one_model", False) or _one_config(records)
    above = bool(found.above_floor) if found.shapes else None
    reasons = [*summary.reasons, *_texts(records, floors), *barred(found.seeds, edges, above, tuned)]
    verdict = "undecided" if reasons else summary.verdict
    return dataclasses.replace(summary, verdict=verdict, reasons=reasons, evidence=dataclasses.asdict(found))


def _texts(records: Sequence[Record], floors: Sequence[Record]) -> list[str]:
    """The corpora with one path that differed between runs, as the standard libraries of two Pythons do; records from
    before 2026-11-27 do not say."""
    found: dict[tuple, set[str]] = {}
    for record in (*records, *floors):
        if TEXT in record.metrics:
            found.setdefault(key(flatten(record.config))[:2], set()).add(record.metrics[TEXT])
    return [
        f"runs have read {len(own)} different texts, all called {where}"
        for (where, _), own in found.items()
        if len(own) > 1
    ]


def _one_config(records: Sequence[Record]) -> bool:
    """Whether all trainings are alike except for the seed: then there is no other arm that a rate could favour."""
    configs = [flatten(record.config) for record in records if "loss" in record.metrics]
    return all(_unseeded(config) == _unseeded(configs[0]) for config in configs)


def _unseeded(config: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if name not in ("train.seed", "data.seed")}


def budget(found: dict[str, Any]) -> str:
    """Tokens and tokens per parameter, in words, from an `Evidence` that was read from a file."""
    if not found.get("tokens"):
        return ""
    each = span(found["tokens_per_parameter"], lambda value: f"{value:.2g}")
    return f"{span(found['tokens'], brief)} tokens, {each} per parameter"


def span(pair: Sequence[float], text: Callable[[float], str]) -> str:
    """The least and the most as text; just one if both read the same."""
    return " to ".join(dict.fromkeys(text(value) for value in pair))
