"""The curse of depth: LayerNorm Scaling against other places of the norm, other sizes and other starts of the branch.

Claim: LayerNorm Scaling, norm outputs over sqrt(block), has a lower loss than Pre-LN and its other rivals: norms in
  other places, factors on the branches, and scaled starts.
Source: Sun et al. 2025, arXiv:2502.05795, Tables 1, 6, 7, 8, and its released scripts
Expected: perplexity at 130M / 250M / 350M / 1B: LNS 25.76 / 20.35 / 18.20 / 15.71, Pre-LN 26.73 / 21.92 / 19.58 /
  17.02, Mix-LN 26.07 / 21.39 / 1363 / 1415, Post-LN 26.95 / 1410 / 1368 / 1391, DeepNorm 27.17 / 22.77 / 1363 / 1409
  (with the alpha of 32 blocks at every depth and an enlarged start: no evidence about DeepNorm); at 130M / 250M scaled
  start 26.04 / 20.98, LNS with it 25.80 / 20.79, depth-scaled start 26.95 / 21.50, SkipInit 27.41 / 22.29, LayerScale
  27.93 / 23.45; at 130M Sandwich-LN 26.51; the factor elsewhere 26.43 (MLP's norm), 26.53 (branch output), 26.89
  (attention's norm), 26.97 (in front of the norm, where it does nothing: noise is about 0.24), 1358 (residual). All
  understated: the mean loss was multiplied by B/(B + 1), B batches per rank, so 25.76 is about 25.9 and 20.35 about
  21.0. From elsewhere: 0.2 to 0.6 ahead of Pre-LN at 50B tokens, and no longer ahead beyond 72 blocks, arXiv:2603.05369
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: 8 GPUs or a TPU slice, one task per run
Time: smoke 13 s; cpu about 30 min with --processes 2; h200 and paper not measured
Command: python -m experiments.curse_of_depth --processes 2

As in the source: Adam without weight decay or clipping, a cosine to 10%, SwiGLU, no QK-norm. Not as there: parameters
and optimizer are float32; start values are the library's (matrices of variance 1/fan-in, an embedding of unit scale;
there 0.02 for all); documents are packed (there one per sequence); the corpus is whatever is given; the learning rate
is tuned for every arm (there one for all): the first seed is trained at every rate of a grid around that of the source
or, at the small sizes, around the scheme's default, the other seeds at the best; a best at the grid's edge is marked.

Where the factor stands elsewhere: `experiments.harness.placements`. Variance: over the residual's features, mean over
tokens, in front of every block and behind the last. Damage: what leaving out one block, with no fine-tuning, adds to
the loss on the first eighth of the validation batches.
"""

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float
from matplotlib.figure import Figure

import experiments.harness.placements  # noqa: F401 (registers the placements)
from experiments.harness.figures import panels
from experiments.harness.jobs import Job, Record, Training, looked_at, seeded
from experiments.harness.results import Summary
from experiments.harness.searching import grids_then_seeds
from experiments.harness.statistics import Interval, paired_interval
from experiments.harness.tuning import Tuned, confirmed
from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.measure.cuts import Cutter
from nagjax.measure.interventions import residual, through
from nagjax.measure.norms import variance
from nagjax.model.config import ModelConfig
from nagjax.residual import Scheme, find_scheme
from nagjax.runs.config import OptimizerConfig, RunConfig
from nagjax.runs.opening import OpenRun, open_run
from nagjax.train.evaluator import Evaluator
from nagjax.train.loss import Batch

JUDGED = "lns"
PRE_LN = "pre_ln"
CAVEAT, ALONE = "lns_scaled_start", "scaled_start"  # LNS with the scaled start; the scaled start without LNS
RIVALS = (
    *(PRE_LN, "post_ln", "deepnorm", "mix_ln", "sandwich", "peri_ln"),
    *("layer_scale", "skip_init", "rezero", ALONE, "depth_scaled"),
)
PLACEMENTS = ("lns_on_mlp", "lns_on_branch", "lns_on_attention", "lns_before_norm", "lns_on_residual")
OPTIONS = {PRE_LN: ("plain", {"scaled_start": False}), ALONE: ("plain", {"scaled_start": True})}


def scheme_of(arm: str) -> Scheme:
    """The arm's scheme. Raises UserError for an unknown one."""
    name, options = OPTIONS.get(arm, (arm, {}))
    return find_scheme(name)(**options)


@dataclasses.dataclass(frozen=True)
class Shape:
    """A model and its training. `lr` is the middle of the grid; None: each scheme's default for the model's size."""

    depth: int
    width: int
    steps: int
    hidden: int | None = None
    heads: int | None = None
    lr: float | None = None
    warmup: float = 0.1


SHAPES = {
    "smoke": Shape(4, 16, 4),
    "small": Shape(16, 32, 80),
    "medium": Shape(24, 256, 300),
    "130M": Shape(12, 768, 20_000, 2048, 12, 1e-3),
    "250M": Shape(24, 768, 40_000, 2560, 16, 1e-3),
    "350M": Shape(24, 1024, 60_000, 2736, 16, 5e-4),  # by the scripts; the paper says 1e-3
    "1B": Shape(24, 2048, 100_000, 5461, 32, 5e-4, 0.01),
}


@dataclasses.dataclass(frozen=True)
class Settings:
    models: tuple[str, ...]  # of SHAPES
    context: int
    batch: int
    seeds: int
    arms: tuple[str, ...] = (JUDGED, *RIVALS, CAVEAT, *PLACEMENTS)
    factors: tuple[float, ...] = (0.3, 1.0, 3.0)  # of the middle learning rate
    eval_batches: int = 24
    data: str = "stdlib"  # or a folder made by nagjax data prepare


SIZES = {
    "smoke": Settings(("smoke",), 16, 8, 1, ("lns_on_mlp",), (1.0,), 1),
    "cpu": Settings(("small",), 64, 8, 3, eval_batches=16),
    "h200": Settings(("medium",), 256, 64, 2),
    "paper": Settings(("130M", "250M", "350M", "1B"), 256, 512, 3, eval_batches=80),
}


def plan(settings: Settings) -> list[Job]:
    """All grids, then the other seeds of all."""
    for model in settings.models:
        if model not in SHAPES:
            raise UserError("models", model, f"known models: {', '.join(SHAPES)}")
    arms = {f"{model}-{arm}": {"model": model, "arm": arm} for model in settings.models for arm in settings.arms}
    return grids_then_seeds(arms, lambda name, seed: _grid(settings, **arms[name], seed=seed), settings.seeds)


def _grid(settings: Settings, model: str, arm: str, seed: int) -> tuple[Training, ...]:
    at_best = seed > 0 or settings.seeds == 1  # as far as it is known beforehand
    return tuple(
        Training(
            f"{model}-{arm}-x{factor:g}-s{seed}",
            {"model": model, "arm": arm, "factor": factor, "seed": seed},
            seeded(_config(settings, SHAPES[model], arm, factor), seed),
            use_of_depth if at_best else None,
        )
        for factor in settings.factors
    )


def _config(settings: Settings, shape: Shape, arm: str, factor: float) -> RunConfig:
    scheme = scheme_of(arm)
    model = ModelConfig(
        depth=shape.depth,
        width=shape.width,
        heads=shape.heads,
        hidden=shape.hidden,
        context=settings.context,
        qk_norm=False,
    )
    rate = factor * (shape.lr or scheme.default_rate(shape.width, shape.depth))
    optimizer = OptimizerConfig(lr=rate, warmup=shape.warmup, weight_decay=0.0, beta2=0.999, clip=0.0)
    train = looked_at(shape.steps, settings.batch, settings.eval_batches, times=4)
    return RunConfig(scheme, model, optimizer, train, DataConfig(path=settings.data))


def use_of_depth(folder: Path) -> dict:
    """Variance of the residual in front of every block and behind the last, and the damage of each block's absence."""
    run = open_run(folder)
    seen = list(Evaluator(run.blueprint).batches(max(run.config.train.eval_batches // 8, 1)))
    return {
        "variance": [round(float(v), 5) for v in variances(run, seen)],
        "damage": [round(float(d), 5) for d in Cutter(run).drops(seen)],
    }


def variances(run: OpenRun, batches: Sequence[Batch]) -> Float[np.ndarray, "L+1"]:
    """Mean over the counted tokens."""
    graph, params = nnx.split(run.model)

    def intervene(model, stream, call):
        after = through(model, stream, call)
        return after, tuple(variance(residual(model.scheme, one)) for one in (stream, after))

    @jax.jit
    def look(params, batch: Batch) -> Float[Array, "L+1"]:
        before, after = nnx.merge(graph, params)(batch.tokens, batch.where, intervene=intervene).seen
        values = jnp.concatenate([before, after[-1:]])
        return jnp.sum(values * batch.weights, axis=(1, 2)) / jnp.sum(batch.weights)

    return np.mean([np.asarray(look(params, batch)) for batch in batches], axis=0)


Best = dict[tuple[str, str], Tuned]  # by model and arm


def _best(settings: Settings, records: Sequence[Record]) -> Best:
    pairs = [(model, arm) for model in settings.models for arm in settings.arms]
    found = {(m, a): confirmed(records, settings.factors, model=m, arm=a) for m, a in pairs}
    return {pair: one for pair, one in found.items() if one is not None}


def lead(settings: Settings, best: Best, model: str, arm: str) -> Interval | None:
    """The arm's loss minus that of LayerNorm Scaling, over seeds; infinite for an arm that diverged at all rates; None
    where either was not run, or LayerNorm Scaling diverged."""
    if not {arm, JUDGED} <= set(settings.arms) or (model, JUDGED) not in best:
        return None
    if (model, arm) not in best:
        return Interval(math.inf, math.inf, math.inf)
    return paired_interval(best[model, arm].losses, best[model, JUDGED].losses)


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    best = _best(settings, records)
    leads = {model: {arm: lead(settings, best, model, arm) for arm in settings.arms} for model in settings.models}
    told = [f"{model}: {_told(settings, best, leads[model], model)}" for model in settings.models]
    details = {
        "at_the_grid_edge": [f"{model}-{arm}" for (model, arm), one in best.items() if one.edge],
        "variance": {f"{model}-{arm}": _mean(one, "variance") for (model, arm), one in best.items()},
        "damage": {f"{model}-{arm}": _mean(one, "damage") for (model, arm), one in best.items()},
    }
    rows = [_row(best, leads, model, arm) for model in settings.models for arm in settings.arms]
    return Summary("; ".join(told), _verdict(settings, best, leads), rows, details)


def _told(settings: Settings, best: Best, leads: dict[str, Interval | None], model: str) -> str:
    if (model, JUDGED) not in best:
        finished = ", ".join(f"{arm} {best[model, arm].loss}" for arm in settings.arms if (model, arm) in best)
        return f"no loss of {JUDGED}; {finished or 'nor of another'}"
    behind = lambda arms: ", ".join(f"{arm} {_signed(leads[arm])}" for arm in arms if leads.get(arm)) or "none"  # noqa: E731
    ordered = sorted((a for a in RIVALS if leads.get(a)), key=lambda arm: leads[arm].estimate)
    return (
        f"{JUDGED} {best[model, JUDGED].loss} nats per token, each arm at its best rate ({settings.seeds} seeds);"
        f" above it by {behind(ordered)}; the factor elsewhere {behind(PLACEMENTS)}; with the scaled start"
        f" {behind((CAVEAT,))}"
    )


def _signed(gap: Interval) -> str:
    if math.isinf(gap.estimate):
        return "diverged"
    return f"{gap.estimate:+.4f}" + (f" [{gap.low:+.4f}, {gap.high:+.4f}]" if math.isfinite(gap.low) else "")


def _verdict(settings: Settings, best: Best, leads: dict[str, dict[str, Interval | None]]) -> str:
    """By intervals over seeds: below every rival at every size; one rival surely below it, and it is not so."""
    if not {JUDGED, *RIVALS} <= set(settings.arms):
        return "undecided"
    for model in settings.models:
        if (model, JUDGED) not in best and any((model, arm) in best for arm in RIVALS):
            return "not supported"
    gaps = [leads[model][arm] for model in settings.models for arm in RIVALS]
    known = [gap for gap in gaps if gap is not None]
    if any(gap.high < 0 for gap in known):
        return "not supported"
    return "supported" if len(known) == len(gaps) and all(gap.low > 0 for gap in known) else "undecided"


def _mean(one: Tuned, name: str) -> list[float]:
    return [round(float(v), 5) for v in np.mean([run[name] for run in one.runs.values() if name in run], axis=0)]


def _row(best: Best, leads: dict, model: str, arm: str) -> dict:
    head, one = {"model": model, "arm": arm}, best.get((model, arm))
    if one is None:
        shown = dict.fromkeys(("lr x", "loss", "perplexity", f"minus {JUDGED}"), "diverged")
        return head | shown | dict.fromkeys(("variance, last / first", "damage, late / early"), "")
    spread, damage = _mean(one, "variance"), np.array(_mean(one, "damage"))
    quarter = max(len(damage) // 4, 1)
    gap = leads[model][arm]
    return head | {
        "lr x": f"{one.factor:g}{' (edge)' if one.edge else ''}",
        "loss": str(one.loss),
        "perplexity": math.exp(one.loss.estimate),
        f"minus {JUDGED}": "" if gap is None or arm == JUDGED else _signed(gap),
        "variance, last / first": spread[-1] / max(spread[0], 1e-12),
        "damage, late / early": f"{damage[-quarter:].mean():.4f} / {damage[:quarter].mean():.4f}",
    }


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    best, model = _best(settings, records), settings.models[0]
    figure, (losses, spread, damage) = panels(
        3, f"The curse of depth, each arm at its best learning rate ({model})", 6.0
    )
    own = {arm: best[model, arm] for arm in settings.arms if (model, arm) in best}
    ordered = sorted(own, key=lambda arm: own[arm].loss.estimate)
    for row, arm in enumerate(ordered):
        loss = own[arm].loss
        half = loss.high - loss.estimate if math.isfinite(loss.high) else 0.0
        losses.errorbar(loss.estimate, row, xerr=half, marker="o", capsize=3, **_style(arm))
    losses.set_yticks(range(len(ordered)), [scheme_title(arm) for arm in ordered])
    losses.invert_yaxis()
    losses.set_xlabel("validation loss (nats per token)")
    for arm, one in own.items():
        values = _mean(one, "variance")
        spread.plot(range(len(values)), values, **_style(arm))
        damage.plot(range(1, len(values)), _mean(one, "damage"), marker=".", **_style(arm))
    spread.set_yscale("log")
    spread.set_xlabel("blocks passed")
    spread.set_ylabel("variance of the residual")
    damage.set_yscale("symlog", linthresh=0.01)
    damage.set_xlabel("block left out")
    damage.set_ylabel("loss added (nats per token)")
    if own.keys() & SHOWN.keys():
        damage.legend(frameon=False)
    return figure


def scheme_title(arm: str) -> str:
    return {PRE_LN: "Pre-LN", ALONE: "Pre-LN, scaled start"}.get(arm) or find_scheme(arm).title


SHOWN = {JUDGED: "#d55e00", PRE_LN: "#4d4d4d", ALONE: "#0072b2", "sandwich": "#009e73", "mix_ln": "#cc79a7"}


def _style(arm: str) -> dict:
    """The arms the story is about in colour and in front, the others faint."""
    if arm in SHOWN:
        return {"color": SHOWN[arm], "label": scheme_title(arm), "zorder": 3}
    return {"color": "#bbbbbb", "linewidth": 1, "zorder": 1}


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
