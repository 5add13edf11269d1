"""Every residual scheme there is, at 64 and 128 blocks, on equal terms.

Claim: at 64 and at 128 blocks NAG is ahead of every other residual scheme of the library, at equal width and tokens and
  each at its best learning rate.
Source: this project's question; no comparison of these schemes at such depths is published. Partial ones: ProRes,
  arXiv:2603.05369; Keel, arXiv:2601.19895; DenseFormer, arXiv:2402.02622; SiameseNorm, arXiv:2602.08064; CompleteP,
  arXiv:2505.01618
Expected: nothing published for all together; in the partial ones ProRes is ahead of pre-norm, sandwich, DeepNorm and
  LayerNorm Scaling at 72 to 120 blocks, where LayerNorm Scaling fades; mean score of pre-norm / Keel 45.3 / 46.5 at 128
  sublayers and 57.9 / 60.9 at 1024, Keel's largest stable learning rate at 64 being 34, 29 and 12 times that of
  post-norm, DeepNorm and Mix-LN; perplexity of pre-norm / DenseFormer 17.82 / 17.12 at 72 blocks, of pre-norm /
  SiameseNorm (not in the library) 18.02 / 15.98 at 80; CompleteP reaches muP's loss at 179 blocks with 34% fewer FLOPs
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: a TPU slice or 8 GPUs, one task per run
Time: smoke 8 s; cpu about 40 min with --processes 2, less with JAX_COMPILATION_CACHE_DIR set, for the seeds share
  programs; h200 and paper not measured
Command: python -m experiments.field --processes 2

A scheme takes part by being in the library; one that a script registers does not. Width, batch and tokens are the same
for all, or with --match flops the training FLOPs of plain pre-norm at that depth are (of matrix products: what mixes
the lanes of a stream is not counted). Each scheme starts as its class has it. Its learning rate is tuned at every
depth: the first seed is trained at the scheme's default for that depth (`Scheme.default_rate`) times every factor of
the grid, the other seeds at the best one; a best at the edge of the grid is marked, for there the tuning is not
finished. Differences are paired by seed. "Supported" takes every other scheme's 95% interval above NAG's at every
depth, where what diverged at all rates is behind; "not supported" takes one scheme's below NAG's at some depth, with
the interval widened for the number of comparisons (Bonferroni), or NAG's divergence. Time per step is the median in the
runs themselves, on whatever else the machine did; `stream` is what a block hands to the next one for each token, which
is kept for the backward pass.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from matplotlib.figure import Figure

from experiments.harness.figures import COLORS, panels
from experiments.harness.jobs import Job, Record, Training, looked_at, seeded
from experiments.harness.matching import train_flops, with_flops
from experiments.harness.results import Summary
from experiments.harness.searching import grids_then_seeds
from experiments.harness.statistics import Interval, paired_interval
from experiments.harness.tuning import Tuned, confirmed
from nagjax.data import DataConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import Boundary, find_scheme, schemes
from nagjax.runs.config import OptimizerConfig, RunConfig

PLAIN, JUDGED = "plain", "nag"
OWN = tuple(name for name, scheme in schemes().items() if scheme.__module__.startswith("nagjax.residual."))


@dataclasses.dataclass(frozen=True)
class Settings:
    depths: tuple[int, ...]
    width: int
    context: int
    batch: int
    steps: int  # of plain, where FLOPs are matched
    seeds: int
    schemes: tuple[str, ...] = OWN
    factors: tuple[float, ...] = (0.3, 1.0, 3.0)  # of the scheme's default learning rate
    match: Literal["tokens", "flops"] = "tokens"
    eval_batches: int = 24
    data: str = "stdlib"  # or a folder made by nagjax data prepare


SIZES = {
    "smoke": Settings((2,), 16, 16, 8, 4, 1, (PLAIN, JUDGED), (1.0,), eval_batches=1),
    "cpu": Settings((64, 128), 32, 32, 4, 50, 3, eval_batches=12),
    "h200": Settings((64, 128), 256, 512, 64, 400, 3),
    "paper": Settings((64, 128), 640, 2048, 256, 10_000, 3, factors=(0.1, 0.3, 1.0, 3.0)),
}


def plan(settings: Settings) -> list[Job]:
    """All grids, then the other seeds of all."""
    arms = {f"{s}-{depth}": {"scheme": s, "depth": depth} for depth in settings.depths for s in settings.schemes}
    return grids_then_seeds(arms, lambda name, seed: _grid(settings, **arms[name], seed=seed), settings.seeds)


def _grid(settings: Settings, scheme: str, depth: int, seed: int) -> tuple[Training, ...]:
    return tuple(
        Training(
            f"{scheme}-{depth}-x{factor:g}-s{seed}",
            {"scheme": scheme, "depth": depth, "factor": factor, "seed": seed},
            seeded(at_rate(_config(settings, scheme, depth), factor), seed),
            functools.partial(measured, _config(settings, scheme, depth)),
        )
        for factor in settings.factors
    )


@functools.cache
def _config(settings: Settings, scheme: str, depth: int) -> RunConfig:
    """At the scheme's default learning rate."""
    chosen = find_scheme(scheme)()
    model = ModelConfig(depth=depth, width=settings.width, context=settings.context)
    optimizer = OptimizerConfig(lr=chosen.default_rate(settings.width, depth))
    train = looked_at(settings.steps, settings.batch, settings.eval_batches, times=2)
    config = RunConfig(chosen, model, optimizer, train, DataConfig(path=settings.data))
    if settings.match == "tokens" or scheme == PLAIN:
        return config
    return with_flops(config, train_flops(_config(settings, PLAIN, depth)))


def at_rate(config: RunConfig, factor: float) -> RunConfig:
    return dataclasses.replace(config, optimizer=dataclasses.replace(config.optimizer, lr=factor * config.optimizer.lr))


def measured(config: RunConfig, folder: Path) -> dict[str, Any]:
    """stream_bytes: of one token, between two blocks."""
    scheme, width = config.scheme, config.model.width

    def opened():
        rngs = nnx.Rngs(0)
        entry, ends = scheme.entry(width, rngs), scheme.ends(width, 1.0, rngs)
        here = (jnp.int32(0), jnp.int32(1), jnp.float32(1.0), config.model.sublayers)
        embedding = jnp.zeros((1, 1, width), config.model.compute_dtype)
        return scheme.open(embedding, Boundary(None, entry, *here), ends)

    leaves = jax.tree.leaves(jax.eval_shape(opened))
    return {"stream_bytes": sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)}


def entrants(settings: Settings, records: Sequence[Record], depth: int) -> dict[str, Tuned]:
    """Of a depth, those that trained, the lowest mean loss first."""
    found = {scheme: confirmed(records, settings.factors, scheme=scheme, depth=depth) for scheme in settings.schemes}
    sound = {scheme: one for scheme, one in found.items() if one is not None}
    return dict(sorted(sound.items(), key=lambda item: item[1].loss.estimate))


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    ranked = {depth: entrants(settings, records, depth) for depth in settings.depths}
    told = "; ".join(f"{depth} blocks: {_told(found)}" for depth, found in ranked.items())
    text = f"nats per token at equal {settings.match} ({settings.seeds} seeds), {told}"
    rows = [row for depth, found in ranked.items() for row in _rows(settings, depth, found)]
    each = [(f"{scheme}-{depth}", found.get(scheme)) for depth, found in ranked.items() for scheme in settings.schemes]
    details = {
        "below_plain": {str(depth): _apart(found, below=True) for depth, found in ranked.items()},
        "above_plain": {str(depth): _apart(found, below=False) for depth, found in ranked.items()},
        "diverged": [name for name, one in each if one is None],
        "at_the_grid_edge": [name for name, one in each if one is not None and one.edge],
    }
    losses = [{scheme: one.losses for scheme, one in found.items()} for found in ranked.values()]
    return Summary(text, verdict(losses, [s for s in settings.schemes if s != JUDGED]), rows, details)


def _told(found: dict[str, Tuned]) -> str:
    order = list(found)
    shown = dict.fromkeys(order[:3] + [scheme for scheme in (JUDGED, PLAIN) if scheme in found])
    text = ", ".join(f"{order.index(s) + 1}. {s} {found[s].loss.estimate:.4f}" for s in shown)
    below = ", ".join(_apart(found, below=True)) or "none"
    return f"{text} of {len(order)} that trained; interval below plain's: {below}"


def _apart(found: dict[str, Tuned], below: bool) -> list[str]:
    """The schemes whose 95% interval of the difference to plain is all on one side of 0."""
    if PLAIN not in found:
        return []
    gaps = {s: paired_interval(one.losses, found[PLAIN].losses) for s, one in found.items() if s != PLAIN}
    return [scheme for scheme, gap in gaps.items() if (gap.high < 0 if below else gap.low > 0)]


def verdict(ranked: Sequence[dict[str, dict[int, float]]], others: Sequence[str]) -> str:
    """See the recipe; `ranked` has, for every depth, losses by scheme and seed of what did not diverge."""
    if not others or not all(ranked):
        return "undecided"
    if any(JUDGED not in found for found in ranked):
        return "not supported"
    pairs = [(found[scheme], found[JUDGED]) for found in ranked for scheme in others if scheme in found]
    strict = 1 - 0.05 / (len(others) * len(ranked))
    if any(paired_interval(*pair, confidence=strict).high < 0 for pair in pairs):
        return "not supported"
    return "supported" if all(paired_interval(*pair).low > 0 for pair in pairs) else "undecided"


COLUMNS = ("lr x", "loss", "over plain", "minus plain", "parameters", "FLOPs", "step time", "stream")


def _rows(settings: Settings, depth: int, found: dict[str, Tuned]) -> list[dict]:
    """The lowest loss first and what diverged last; costs are relative to plain's."""
    plain, rows = found.get(PLAIN), []
    for scheme in [*found, *(s for s in settings.schemes if s not in found)]:
        head, one = {"blocks": depth, "scheme": scheme}, found.get(scheme)
        if one is None:
            rows.append(head | dict.fromkeys((*COLUMNS, "growth", "late turn"), "diverged"))
            continue
        gap: Interval | None = paired_interval(one.losses, plain.losses) if plain and scheme != PLAIN else None
        names = ("loss", "parameters", "train_flops_per_token", "step_seconds", "stream_bytes")
        ratios = [_mean(one, name) / _mean(plain, name) if plain else "" for name in names]
        cells = (
            f"{one.factor:g}{' (edge)' if one.edge else ''}",
            str(one.loss),
            ratios[0],
            str(gap or ""),
            *ratios[1:],
        )
        turned = {"growth": _mean(one, "growth"), "late turn": _mean(one, "late_turn_degrees")}
        rows.append(head | dict(zip(COLUMNS, cells, strict=True)) | turned)
    return rows


def _mean(one: Tuned, name: str) -> float:
    return float(np.mean([run[name] for run in one.runs.values()]))


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    found = {depth: entrants(settings, records, depth) for depth in settings.depths}
    title = f"Residual schemes at equal width and {settings.match}, each at its best learning rate"
    figure, axes = panels(len(found), title, height=2.0 + 0.24 * max(len(own) for own in found.values()))
    for ax, (depth, own) in zip(axes, found.items(), strict=True):
        for place, (scheme, one) in enumerate(own.items()):
            color = {JUDGED: COLORS[0], PLAIN: COLORS[2]}.get(scheme, COLORS[1])
            half = one.loss.high - one.loss.estimate
            bar = half if np.isfinite(half) else 0.0
            ax.errorbar(one.loss.estimate, place, xerr=bar, marker="o", capsize=3, color=color)
            ax.scatter(list(one.losses.values()), [place] * len(one.losses), s=9, color=color, alpha=0.5, zorder=3)
        if PLAIN in own:
            ax.axvline(own[PLAIN].loss.estimate, color=COLORS[2], linewidth=1, alpha=0.5)
        ax.set_yticks(range(len(own)), list(own))
        ax.invert_yaxis()
        ax.set_title(f"{depth} blocks")
        ax.set_xlabel("validation loss (nats per token)")
    return figure


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
