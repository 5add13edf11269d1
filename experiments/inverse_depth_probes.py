"""Inside language models: do their layers work as an ensemble, each turning the residual by 1/depth on its own account?

Claim: Middle blocks turn the residual by 1/depth each, in uncorrelated directions: plain pre-norm models average over
  layers.
Source: Liu, Kangaslahti, Liu & Gore 2026, arXiv:2602.05970 (Pythia, OPT and Qwen2.5), and its released scripts
Expected: the mean turn of the middle blocks falls with the depth with exponent 1; the first and the last block turn by
  90 degrees; successive updates are 90 degrees apart. The released scripts take the last state behind the final norm,
  which affects every number about the last block; here it is the residual before that norm
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: 8 GPUs or a TPU slice
Time: smoke 15 s; cpu about 10 min with --processes 2; models 3 min; h200 and paper not measured
Command: python -m experiments.inverse_depth_probes --processes 2

In full: the first and the last block turn the residual by about a right angle whatever the depth, those in the middle
by 1/depth each, and successive updates are uncorrelated, at right angles.

What is measured, with h_l the residual in front of block l, of tokens inside documents: turn arccos cos(h_l, h_l+1);
angle between successive updates h_l+1 - h_l; ||h_l||; angle to the end arccos cos(h_l, h_L); progress
<h_l - h_0, h_L - h_0> / ||h_L - h_0||^2; and early exits: the loss where the last block reads h_l. Middle blocks are
the middle half; the exponent over all blocks but the first and the last stands beside it, and so does that of the same
models before their training, which is what their initial values alone would say. Intervals are Student's over seeds; a
claim about an angle is met within 20 degrees at every depth, the claim about the exponent within a quarter. Models
trained here have their schemes' default rates, untuned, and decide nothing.

Groups of tokens: in the source's Figure 2, PCA and clustering give two, 99.6% of the tokens, which the middle blocks
turn alike, and 0.4%, first tokens, which are done early. Here k-means with k = 2 groups all counted tokens by their
turns. The first tokens of documents and rows are included, which every other number leaves out. No verdict depends on
the groups.

`--runs FOLDER ...` looks at these models instead of training any: runs, or what `nagjax import` reads. Intervals are
then over batches of text. They decide nothing either, as they say nothing about other models of the same sizes.
"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness.figures import look, panels, with_spread
from experiments.harness.jobs import Record, Training, looked_at, seeded
from experiments.harness.looks import MODELS, Look, looks, named_corpus, rounded
from experiments.harness.results import Summary
from experiments.harness.statistics import Interval, mean_interval, power_law
from experiments.harness.turning import columns, draw_groups, grouped
from experiments.harness.verdicts import within
from nagjax.data import DataConfig
from nagjax.data.pipeline import STDLIB
from nagjax.generate.evaluate import run_text
from nagjax.interop.load import load
from nagjax.measure import angles, norms
from nagjax.measure.cuts import Cutter, forward_options
from nagjax.measure.interventions import residual, through
from nagjax.model.config import ModelConfig
from nagjax.ranges import Count, Natural
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig
from nagjax.runs.opening import OpenRun
from nagjax.train.evaluator import Evaluator
from nagjax.train.loss import Batch
from nagjax.train.state import Tree

PLAIN = "plain"
TOKENS = 256  # sampled from every batch
EXITS = 8  # depths of early exits
RIGHT = (70.0, 110.0)  # degrees that count as a right angle
NEAR_ONE = (0.75, 1.25)


@dataclasses.dataclass(frozen=True)
class Settings:
    depths: tuple[Count, ...]
    width: Count
    context: Count
    batch: Count
    steps: Count
    seeds: Natural
    schemes: tuple[str, ...] = (PLAIN, "lns", "nag")
    eval_batches: Count = 4  # those looked at
    runs: tuple[str, ...] = ()  # models to look at instead
    data: str = STDLIB  # or a folder made by nagjax data prepare; for `runs` their own corpus unless it is a folder


SIZES = {
    "smoke": Settings((3,), 16, 16, 8, 2, 1, ("nag",), 1),
    "cpu": Settings((6, 12, 24, 48), 32, 64, 8, 120, 3),
    "h200": Settings((6, 12, 24, 48, 96), 512, 1024, 32, 600, 1),
    "paper": Settings((6, 12, 24, 48, 96), 512, 1024, 64, 8000, 5),
    "models": Settings((24,), 64, 256, 4, 20_000, 1, eval_batches=16, runs=MODELS),
}


def plan(settings: Settings) -> list[Training | Look]:
    if settings.runs:
        asked = {"eval_batches": settings.eval_batches, "data": settings.data}
        data = named_corpus(settings.data)
        return looks(settings.runs, asked, lambda run: inside(run, settings.eval_batches, data))
    return [
        Training(
            f"{scheme}-{depth}-s{seed}",
            {"scheme": scheme, "depth": depth, "seed": seed},
            seeded(_config(settings, scheme, depth), seed),
            trained,
        )
        for seed in range(settings.seeds)
        for depth in settings.depths
        for scheme in settings.schemes
    ]


def _config(settings: Settings, scheme: str, depth: int) -> RunConfig:
    model = ModelConfig(depth=depth, width=settings.width, context=settings.context)
    train = looked_at(settings.steps, settings.batch, settings.eval_batches, times=1)
    return RunConfig(find_scheme(scheme)(), model, train=train, data=DataConfig(path=settings.data))


def trained(folder: Path) -> dict:
    """What is inside a trained run, and how its blocks turned the residual before the training (radians)."""
    run = load(folder)
    (batch,) = Evaluator(run.blueprint).batches(1)
    start = looking(run)(run.blueprint.create_params(), batch)
    return inside(run, run.config.train.eval_batches) | {"start": rounded(start["turn"])}


def inside(run: OpenRun, batches: int, data: str | None = None) -> dict:
    """Means over the sampled tokens of each batch, angles in radians: `turn` [batches, L] and `between` [batches, L-1];
    over all batches: `norm`, `to_end` and `progress` [L+1], `exits`: [block, loss], and `groups` of all tokens."""
    text = list(Evaluator(run.blueprint, run_text(run, data)).batches(batches))
    look = looking(run)
    seen = [look(run.params, batch) for batch in text]
    by_batch = {name: np.array([own[name] for own in seen]) for name in seen[0]}
    cutter = Cutter(run)
    at = sorted({round(place) for place in np.linspace(0, cutter.depth - 1, EXITS)})
    return {
        "scheme": run.config.scheme.name,
        "depth": cutter.depth,
        "turn": rounded(by_batch["turn"]),
        "between": rounded(by_batch["between"]),
        **{name: rounded(by_batch[name].mean(axis=0)) for name in ("norm", "to_end", "progress")},
        # The last block reads h_l: the blocks from l on have gone, but it.
        "exits": [[block, cutter.loss(text, range(block, cutter.depth - 1))] for block in at],
        "groups": grouped(run, text),
    }


def looking(run: OpenRun) -> Callable[[Tree, Batch], dict[str, Float[Array, " _"]]]:
    """Parameters and a batch to `profiles` of its sampled tokens, as far into its training as the run is. (One small
    program where `nagjax.measure.probe`, which sees more, is a large one: a plan has many models.)"""
    options = forward_options(run)

    @jax.jit
    def look(params, batch: Batch, chosen):
        def intervene(model, stream, call):
            after = through(model, stream, call)
            rows = [residual(model.scheme, each).reshape(-1, model.config.width)[chosen] for each in (stream, after)]
            return after, rows

        before, after = run.blueprint.model(params)(batch.tokens, batch.where, intervene=intervene, **options).seen
        return profiles(jnp.concatenate([before[:1], after]))

    def sampled(params, batch: Batch):
        counted = np.asarray(batch.weights) > 0
        inner = np.flatnonzero(counted & (np.asarray(batch.positions) > 0))
        return look(params, batch, np.sort(np.random.default_rng(0).permutation(inner)[:TOKENS]))

    return sampled


def profiles(h: Float[Array, "L+1 N D"]) -> dict[str, Float[Array, " _"]]:
    """Means over tokens of what arXiv:2602.05970 measures of a token's residuals."""
    found = {
        "turn": angles.angle(h[:-1], h[1:]),
        "between": angles.successive_update_angle(h),
        "norm": norms.norm(h),
        "to_end": angles.angle_to_end(h),
        "progress": angles.progress_to_end(h),
    }
    return jax.tree.map(lambda own: jnp.mean(own, axis=-1), found)


def middle(values: Sequence[float]) -> float:
    """Mean over the middle half of the depth, at least one value."""
    values, cut = np.asarray(values), len(values) // 4
    return float(np.mean(values[cut : len(values) - cut]))


def between_ends(values: Sequence[float]) -> float:
    """Mean over all but the first and the last, of which there may be nothing else."""
    return float(np.mean(values[1:-1] if len(values) > 2 else values))


Draws = dict[int, dict[int, dict]]  # by depth, then by seed or batch of text: the means `turn` and `between`


def draws(records: Sequence[Record], scheme: str) -> Draws:
    """Of a trained scheme per seed, else per batch; runs that diverged are missing."""
    found: Draws = {}
    for record in records:
        seen = record.metrics
        if seen.get("scheme") != scheme:
            continue
        own = [{name: seen[name][i] for name in ("turn", "between")} for i in range(len(seen["turn"]))]
        if "seed" in record.labels:
            mean = {name: np.mean([one[name] for one in own], axis=0) for name in own[0]}
            drawn = {record.labels["seed"]: mean | {"start": seen["start"]}}
        else:
            drawn = dict(enumerate(own, start=len(found.get(seen["depth"], ()))))  # behind those of another such model
        found.setdefault(seen["depth"], {}).update(drawn)
    return dict(sorted(found.items()))


def exponent(found: Draws, read: Callable[[Sequence[float]], float], name: str = "turn") -> Interval | None:
    """Of 1/depth in what is read off a draw's profile, over the seeds (or batches) that every depth has; None for less
    than two depths, or no such seed."""
    common = sorted(set.intersection(*(set(own) for own in found.values()))) if len(found) > 1 else []
    if not common or name not in next(iter(found.values()))[common[0]]:
        return None
    return mean_interval([power_law(list(found), [read(own[i][name]) for own in found.values()])[0] for i in common])


def degrees(own: dict[int, dict], read: Callable[[dict], float]) -> Interval:
    return mean_interval([float(np.degrees(read(one))) for one in own.values()])


FIRST, LAST = (lambda one: one["turn"][0]), (lambda one: one["turn"][-1])
MIDDLE, BETWEEN = (lambda one: middle(one["turn"])), (lambda one: middle(one["between"]))


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    found = {scheme: draws(records, scheme) for scheme in _schemes(records)}
    told = columns if _grouped(records) else lambda _: {}
    rows = [
        _row(scheme, depth, own) | told(_of(records, scheme, depth))
        for scheme, by_depth in found.items()
        for depth, own in by_depth.items()
    ]
    judged = PLAIN if PLAIN in found else next(iter(found), "")
    ways = {"middle": (middle, "turn"), "all but the ends": (between_ends, "turn"), "at the start": (middle, "start")}
    exponents = {way: {s: exponent(own, *read) for s, own in found.items()} for way, read in ways.items()}
    listed = "; ".join(f"{way} {_listed(own)}" for way, own in exponents.items() if any(own.values()))
    text = [f"exponent of the turn in the depth: {listed or 'needs two depths'}"]
    if judged:
        angled = ", ".join(f"{depth}: {_angles(own)}" for depth, own in found[judged].items())
        text.append(f"first turn / last turn / between successive updates of {judged}, by blocks, degrees {angled}")
    alone = ["intervals over batches of the given models, not over seeds"] if settings.runs else []
    return Summary(
        "; ".join(text),
        "undecided" if alone else verdict(found.get(judged, {}), exponents["middle"].get(judged)),
        rows,
        headline=_headline(judged, exponents["middle"].get(judged)),
        reasons=alone,
    )


def _headline(judged: str, exponent: Interval | None) -> str:
    return f"exponent of {judged}'s middle turn: {exponent.text(2)}" if exponent else ""


def _schemes(records: Sequence[Record]) -> list[str]:
    return list(dict.fromkeys(record.metrics["scheme"] for record in records if "scheme" in record.metrics))


def _listed(exponents: dict[str, Interval | None]) -> str:
    return ", ".join(f"{scheme} {own.text(2)}" for scheme, own in exponents.items() if own is not None)


def _angles(own: dict[int, dict]) -> str:
    return " / ".join(f"{degrees(own, read).estimate:.0f}" for read in (FIRST, LAST, BETWEEN))


def _of(records: Sequence[Record], scheme: str, depth: int) -> list[Record]:
    """Of this scheme and depth, as far as they came through."""
    return [r for r in records if (r.metrics.get("scheme"), r.metrics.get("depth")) == (scheme, depth)]


def _grouped(records: Sequence[Record]) -> bool:
    """Whether any has groups of tokens, which those from before 2026-11-29 have not."""
    return any("groups" in record.metrics for record in records)


def _row(scheme: str, depth: int, own: dict[int, dict]) -> dict:
    reads = {"first": FIRST, "middle": MIDDLE, "last": LAST, "between": BETWEEN}
    return {"scheme": scheme, "blocks": depth} | {name: degrees(own, read).text(1) for name, read in reads.items()}


def verdict(found: Draws, of_middle: Interval | None) -> str:
    """All intervals within their bounds, or any wholly outside of its own."""
    if of_middle is None:
        return "undecided"
    angled = [degrees(own, read) for own in found.values() for read in (FIRST, LAST, BETWEEN)]
    checks = [(of_middle, NEAR_ONE)] + [(one, RIGHT) for one in angled]
    return within(checks)


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    figure, (turns, middles, between, exits, *groups) = panels(4 + _grouped(records), "What each block does, by depth")
    for scheme in _schemes(records):
        color = look(scheme)["color"]
        found = draws(records, scheme)
        for depth, own in found.items():
            deepest = depth == max(found)
            style = {"color": color, "alpha": 1.0 if deepest else 0.35, "label": scheme if deepest else None}
            _profile(turns, [one["turn"] for one in own.values()], **style)
            if deepest:
                _profile(between, [one["between"] for one in own.values()], color=color)
        values = [[np.degrees(middle(one["turn"])) for one in own.values()] for own in found.values()]
        with_spread(middles, list(found), values, color=color)
        at_end = _of(records, scheme, max(found))
        deepest = [record.metrics for record in at_end]
        for ax in groups:
            draw_groups(ax, at_end, color=color)
        blocks = [block / max(found) for block, _ in deepest[0]["exits"]]
        losses = np.mean([[loss for _, loss in one["exits"]] for one in deepest], axis=0)
        exits.plot(blocks, losses, marker="o", color=color)
        guide = np.mean(values[0]) * min(found) / np.array(list(found))
        middles.plot(list(found), guide, "--", color=color, linewidth=1, alpha=0.5)
    depths = sorted({r.metrics["depth"] for r in records if "depth" in r.metrics})
    middles.set_xscale("log", base=2)
    middles.set_yscale("log")
    middles.set_xticks(depths, [str(depth) for depth in depths])
    middles.set_xlabel("blocks")
    middles.set_title("turn of the middle half; dashed: 1 / depth")
    turns.set_yscale("log")
    turns.set_title("turn of each block (degrees)")
    between.axhline(90, color="#999999", linewidth=1)
    between.set_title("between successive updates, deepest")
    exits.set_title("loss of early exits, deepest")
    for ax in groups:
        ax.set_yscale("log")
        ax.set_title("by group of tokens; dashed: the smaller")
    for ax in (turns, between, exits, *groups):
        ax.set_xlabel("place in depth")
    if depths:
        turns.legend(frameon=False)
    return figure


def _profile(ax: Axes, values: Sequence[Sequence[float]], **style) -> None:
    mean = np.degrees(np.mean(values, axis=0))
    ax.plot((np.arange(len(mean)) + 0.5) / len(mean), mean, **style)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
