"""Trained models that skip: which pairs of a token and a sublayer do not run, what the others cost, and the loss."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Float
from scipy.interpolate import PchipInterpolator

from experiments.harness.verdicts import Gap, Verdict, ahead_of_all
from nagjax.mod import ModConfig
from nagjax.mod.costs import costs
from nagjax.runs.opening import OpenRun
from nagjax.train.evaluator import Evaluator
from nagjax.train.loss import Batch

RUN, SKIP = -np.inf, np.inf  # thresholds below and above every score
HALVINGS = 14
CLOSE = 0.003  # how close a rate has to be met


class Point(NamedTuple):
    """The result of one way of skipping."""

    skipped: float  # share of the (token, sublayer) pairs
    flops: float  # forward, per token
    loss: float  # nats per token
    accuracy: float  # share of the targets that were the likeliest


class Skipping:
    """An open run in which a token runs a sublayer if its score reaches the sublayer's threshold.

    Scores are those of a router without parameters of its own: `nag`, the tangent of the coming rotation, or `random`,
    uniform in [0, 1). Thresholds are data, so that all points of a router share one compiled program. Keys and values
    are computed for all tokens in every sublayer that runs for any token.
    """

    def __init__(self, run: OpenRun, router: str):
        self.router = router
        self.run = run.routed(ModConfig(rate=(0.5,), router=router, decider="threshold", kv="all"))
        self.dense = run.routed(ModConfig())
        self.evaluator = Evaluator(self.run.blueprint, causal=True)

    @property
    def depth(self) -> int:
        return self.run.config.model.depth

    def scores(self, cuts: Float[np.ndarray, "#S"], text: Sequence[Batch]) -> tuple[dict, Float[np.ndarray, "L 2"]]:
        """The scores of the evaluation under thresholds by sublayer, and the shares of the tokens that ran, for
        attention and MLP."""
        state = {"cuts": jnp.asarray(np.broadcast_to(cuts, 2 * self.depth), jnp.float32)}
        found, telemetry = self.evaluator(self.run.params, state, self.run.step, text)
        return found, np.array(telemetry["executed"]).reshape(-1, 2)

    def point(self, cuts: Float[np.ndarray, "#S"], text: Sequence[Batch]) -> tuple[Point, Float[np.ndarray, "L 2"]]:
        """The result of choosing tokens one by one; its FLOPs include the router's score of each token."""
        found, ran = self.scores(cuts, text)
        return self._point(found, ran, self.flops(ran, by_token=True)), ran

    def without(self, gone: Sequence[int], text: Sequence[Batch]) -> Point:
        """The result of skipping whole blocks (indices from 0) for all tokens; nothing is chosen, so no scores are paid
        for."""
        cuts = np.full((self.depth, 2), RUN)
        cuts[list(gone)] = SKIP
        found, ran = self.scores(cuts.ravel(), text)
        return self._point(found, ran, self.flops(ran, by_token=False))

    def _point(self, found: dict, ran: Float[np.ndarray, "L 2"], flops: float) -> Point:
        return Point(float(1.0 - ran.mean()), flops, found["loss"], found["accuracy"])

    def flops(self, ran: Float[np.ndarray, "L 2"], *, by_token: bool) -> float:
        """Forward FLOPs per token, by the library's closed form, if these shares of the tokens run; with `by_token`
        including the scores."""
        config = (self.run if by_token else self.dense).config.model
        return costs(config, self.run.blueprint.parameters, self.router, "threshold", shares=ran).forward

    def factor(self, profile: Float[np.ndarray, "#S"], rate: float, text: Sequence[Batch]) -> float:
        """The factor on the thresholds `profile` at which this share of the pairs is skipped, found by bisection,
        because skipping early changes later scores."""
        skipped = lambda factor: self.scores(factor * profile, text)[0]["mod_rate"]  # noqa: E731
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            if skipped(high) >= rate:
                break
            low, high = high, 2.0 * high
        middle = high
        for _ in range(HALVINGS):
            middle = 0.5 * (low + high)
            now = skipped(middle)
            if abs(now - rate) < CLOSE:
                break
            low, high = (middle, high) if now < rate else (low, middle)
        return middle


LINEAR, CUBIC = "linear", "monotone cubic"  # curves through points; the second by Fritsch & Butland 1984


def on_curve(points: Sequence[Sequence[float]], flops: float, field: str = "loss", curve: str = LINEAR) -> float:
    """A field of `Point`s, read at `flops` from a curve through them over their FLOPs; beyond the curve's ends, the
    value at the end."""
    own = [Point(*point) for point in points]
    x, first = np.unique([point.flops for point in own], return_index=True)
    y = np.array([getattr(point, field) for point in own])[first]
    if curve == LINEAR or len(x) < 2:
        return float(np.interp(flops, x, y))
    return float(PchipInterpolator(x, y)(np.clip(flops, x[0], x[-1])))


def on_every_curve(gaps: Callable[[str], Sequence[Gap]]) -> tuple[Verdict, list[str]]:
    """The verdict of gaps that are read from curves between points; if it depends on the kind of curve, it is
    undecided, with the reason."""
    found = {curve: ahead_of_all(gaps(curve)) for curve in (LINEAR, CUBIC)}
    if len({*found.values()}) == 1:
        return found[LINEAR], []
    told = ", ".join(f"{verdict} by a {curve} one" for curve, verdict in found.items())
    return "undecided", [f"the verdict depends on the curve drawn between the points: {told}"]
