"""Calibrated skipping: how much of a densely trained NAG model may be skipped, and what this costs.

One threshold on the tangent of the rotation angle holds for the whole network, so that sublayers differ in how much
they skip.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from nagjax.console import Progress
from nagjax.errors import UserError
from nagjax.files import write_json
from nagjax.generate.evaluate import run_text
from nagjax.measure.cuts import Cutter, choose
from nagjax.mod import ModConfig
from nagjax.mod.costs import costs
from nagjax.runs.folder import read_config
from nagjax.runs.lock import WriterLock
from nagjax.runs.names import CALIBRATION, SKIP_CURVE
from nagjax.runs.opening import OpenRun, by_angle, open_run
from nagjax.train.evaluator import Evaluator

SEARCH = 20  # halvings of the threshold's bracket at most
BLOCKS = ("influence", "late")  # rules of `nagjax.measure.cuts` by which whole blocks are left out
CLOSE = 0.003  # largest error of a rate that is met


def calibrate(
    folder: str | Path,
    rates: Sequence[float],
    *,
    choose: float | None = None,
    rise: float = 0.02,
    batches: int = 8,
    search_batches: int = 2,
    say: Callable[[str], None] = lambda text: None,
) -> dict:
    """Tries rates of skipping on a dense NAG run and saves the chosen one beside its checkpoints.

    For each rate it searches, on training text, the threshold on `tan` of the angle at which this share of the (token,
    sublayer) pairs is skipped; it measures the loss on validation text. Controls show what the choice by angle is
    worth: other tokens of the same sublayers, as many in each; random tokens, at one rate for all attentions and one
    for all MLPs, those that the threshold led to; and whole blocks, those of least influence (measured on the text of
    the search) or the last ones, as many as come nearest to the same FLOPs.

    choose: the rate to save; None takes the highest whose loss rises by at most `rise` nats per token over the dense
    model's. 0 is the dense model: a saved rate is removed. batches, search_batches: numbers of batches, of the run's
    batch size, for the loss and for the search. say: is called with messages on the progress.

    Returns, and writes as skip_curve.json: `points`, each with rate (asked for), threshold, mod_rate (met on validation
    text, total and by kind), executed (by sublayer), capacities (tokens per context, by sublayer), loss, flops
    (forward, per token), tokens_loss and random_loss, and for `influence` and `late` WAY_loss, WAY_flops and WAY_blocks
    (the blocks that are left out, from 1); `dense`; `chosen`; `run` and `step`.

    Raises UserError for a run that is not NAG, was trained with Mixture-of-Depths or has sublayers that every token
    must run; for rates outside [0, 1) or none above 0, for a `choose` that is not among them, for a dense loss that is
    not finite, and for a folder that is being written.
    """
    read_config(Path(folder))  # raises for a folder without a run, before the lock would make it
    with WriterLock(folder, "calibrate", "run"):
        run = open_run(folder, calibrated=False)
        _check(run, rates, choose)
        swept = Sweep(run, batches, search_batches)
        dense = swept.dense()
        say(f"loss of the dense model: {dense['loss']:.4f}")
        points, asked = [], sorted({rate for rate in rates if rate > 0.0})
        progress = Progress("rates done:", len(asked), tell=say)
        for rate in asked:
            points.append(swept.point(rate))
            progress(len(points), f"rate {rate:g}: loss {points[-1]['loss']:.4f}")
        chosen = _choose(points, dense, choose, rise)
        result = {"run": str(folder), "step": run.step, "dense": dense, "points": points, "chosen": chosen}
        write_json(Path(folder) / SKIP_CURVE, result)
        saved = Path(folder) / CALIBRATION
        if chosen:
            write_json(saved, next(p for p in points if p["rate"] == chosen) | {"step": run.step})
        else:
            saved.unlink(missing_ok=True)
    return result


def undo(folder: str | Path) -> None:
    """Returns to the dense model: removes a saved rate, and measures nothing. Raises UserError for a folder that holds
    no run, and for one that is being written."""
    read_config(Path(folder))
    with WriterLock(folder, "calibrate", "run"):
        (Path(folder) / CALIBRATION).unlink(missing_ok=True)


def _check(run: OpenRun, rates: Sequence[float], choose: float | None) -> None:
    scheme, mod = run.config.scheme, run.config.model.mod
    if not scheme.turns:
        raise UserError("run", str(run.folder), f"scheme {scheme.name} has no angle to skip by: give a nag run")
    if mod.active:
        fix = "was trained with Mixture-of-Depths and has thresholds of its own: use nagjax eval"
        raise UserError("run", str(run.folder), fix)
    for name, value, why in (
        ("block.cca", run.config.model.block.cca, "its attention reads the token before, which may have skipped"),
        ("moe.skips", run.config.model.moe.skips, "its tokens skip MLPs by their choice of experts"),
    ):
        if value:
            raise UserError("run", str(run.folder), f"was trained with {name}: {why}, so it cannot be calibrated")
    if not any(rates) or not all(0.0 <= rate < 1.0 for rate in rates):
        fix = "give shares of skipped (token, sublayer) pairs in [0, 1), at least one above 0"
        raise UserError("rates", list(rates), fix)
    if choose is not None and choose not in (0.0, *rates):
        raise UserError("choose", choose, f"is none of the rates {sorted(set(rates))}: add it to --rates")


def _choose(points: list[dict], dense: dict, choose: float | None, rise: float) -> float:
    if choose is not None:
        return choose
    return max((p["rate"] for p in points if p["loss"] <= dense["loss"] + rise), default=0.0)


class Sweep:
    """A run with every sublayer routed. Its thresholds are data, so that all points share one program."""

    def __init__(self, run: OpenRun, batches: int, search_batches: int):
        self.run, self.config = run, run.config.model
        validation = run_text(run)
        training = run_text(run, split="train")
        self.by_angle = self._evaluator(by_angle(0.5), validation)
        self.at_random = self._evaluator(ModConfig(rate=(0.5,), router="random"), validation)
        self.held_out = list(self.by_angle.batches(batches))
        # Not the text on which the loss is measured.
        self.text = list(Evaluator(self.by_angle.blueprint, training, causal=True).batches(search_batches))
        self.between = Cutter(self.run).measure(self.text)

    def _evaluator(self, mod: ModConfig, dataset) -> Evaluator:
        return Evaluator(self.run.routed(mod).blueprint, dataset, causal=True)

    def _score(self, evaluator: Evaluator, cuts, text) -> tuple[dict, np.ndarray]:
        """Scores, and the executed shares [L, 2]."""
        state = {"cuts": jnp.asarray(np.broadcast_to(cuts, self.config.sublayers), jnp.float32)}
        scores, depth = evaluator(self.run.params, state, self.run.step, text)
        return scores, np.array(depth["executed"]).reshape(-1, 2)

    def _flops(self, executed: np.ndarray, scored: bool = True) -> float:
        """Forward FLOPs per token; without the routers' scoring if `scored` is False."""
        mod = by_angle(0.5) if scored else ModConfig()
        config = dataclasses.replace(self.config, mod=mod)
        return costs(config, self.run.blueprint.parameters, "nag", "threshold", shares=executed).forward

    def dense(self) -> dict:
        scores, executed = self._score(self.by_angle, -np.inf, self.held_out)
        if not math.isfinite(scores["loss"]):
            raise UserError("run", str(self.run.folder), f"its loss is {scores['loss']}: nothing can be chosen by it")
        return {"loss": scores["loss"], "flops": self._flops(executed, scored=False)}

    def threshold(self, rate: float) -> float:
        """The threshold at which this share of the pairs is skipped, by bisection: what early sublayers skip changes
        later ones, so the angles of the dense pass alone do not determine it."""
        low, high = 0.0, 1.0
        while self._skipped(high) < rate:
            low, high = high, 2.0 * high
        for _ in range(SEARCH):
            middle = 0.5 * (low + high)
            skipped = self._skipped(middle)
            if abs(skipped - rate) < CLOSE:
                break
            low, high = (middle, high) if skipped < rate else (low, middle)
        return middle

    def _skipped(self, threshold: float) -> float:
        return self._score(self.by_angle, threshold, self.text)[0]["mod_rate"]

    def point(self, rate: float) -> dict:
        threshold = self.threshold(rate)
        scores, executed = self._score(self.by_angle, threshold, self.held_out)
        flops = self._flops(executed)
        skipped = 1.0 - executed.mean(axis=0)
        others, _ = self._score(self.at_random, 1.0 - executed.ravel(), self.held_out)
        chance, _ = self._score(self.at_random, np.tile(skipped, self.config.depth), self.held_out)
        return {
            "rate": rate,
            "threshold": threshold,
            **{name: scores[name] for name in ("mod_rate", "mod_rate_attention", "mod_rate_mlp")},
            "executed": executed.ravel().tolist(),
            "capacities": np.ceil(executed.ravel() * self.config.context).astype(int).tolist(),
            "loss": scores["loss"],
            "flops": flops,
            "tokens_loss": others["loss"],
            "random_loss": chance["loss"],
        } | {f"{way}_{of}": value for way in BLOCKS for of, value in self._without(way, flops).items()}

    def _without(self, way: str, flops: float) -> dict:
        """The loss without whole blocks, as many as come nearest to the same FLOPs."""
        sets = [choose(way, count, *self.between) for count in range(self.config.depth + 1)]
        stays = np.ones((len(sets), self.config.depth, 2))
        for own, gone in zip(stays, sets, strict=True):
            own[gone] = 0.0
        each = [self._flops(own, scored=False) for own in stays]
        count = int(np.argmin(np.abs(np.array(each) - flops)))
        scores, _ = self._score(self.by_angle, np.where(stays[count] > 0.0, -np.inf, np.inf).ravel(), self.held_out)
        return {"blocks": [block + 1 for block in sets[count]], "flops": each[count], "loss": scores["loss"]}
