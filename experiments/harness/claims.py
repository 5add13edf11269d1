"""The claims that a comparison can make about its arms, and how differences between arms decide them."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np

from experiments.harness.outcome import Outcome
from experiments.harness.settings import Shape
from experiments.harness.statistics import Interval, mean_interval
from experiments.harness.verdicts import LEVEL, Gap, Verdict, ahead_of_all, both, same_sign, sides, signed, within


@dataclasses.dataclass(frozen=True)
class Decision:
    """The outcome for a claim. `headline` is the one most important number, with its interval."""

    verdict: Verdict
    headline: str
    told: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim about the arm `judged`; `decide` gives its outcome."""

    judged: str

    @property
    def named(self) -> tuple[str, ...]:
        """The arms that the claim names; all must be in the recipe."""
        return (self.judged,)

    def about(self, arms: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the recipe's arms without which a size cannot decide the claim."""
        return self.named

    @property
    def reference(self) -> str:
        """The arm relative to which tables and figures show differences."""
        return self.judged

    def decide(self, outcome: Outcome) -> Decision:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Against(Claim):
    """A claim about one arm and a rival, relative to which differences are shown."""

    rival: str

    @property
    def named(self) -> tuple[str, ...]:
        return self.judged, self.rival

    @property
    def reference(self) -> str:
        return self.rival


@dataclasses.dataclass(frozen=True)
class Lowest(Claim):
    """The judged arm's loss is lower than that of every rival at every shape."""

    rivals: tuple[str, ...] = ()  # empty: all other arms

    @property
    def named(self) -> tuple[str, ...]:
        return self.judged, *self.rivals

    def about(self, arms: tuple[str, ...]) -> tuple[str, ...]:
        return self.named if self.rivals else arms

    def decide(self, outcome: Outcome) -> Decision:
        if self.judged not in outcome.arms:
            return Decision("undecided", f"no {self.judged}", outcome.ranking())
        rivals = [arm for arm in self.rivals or outcome.arms if arm != self.judged and arm in outcome.arms]
        gaps = [outcome.gap(arm, self.judged, shape) for shape in outcome.shapes for arm in rivals]
        nearest = min(gaps, key=lambda gap: gap.middle, default=None)
        head = f"{nearest.name} minus {self.judged}: {outcome.gap_text(nearest)} nats" if nearest else "no rival"
        return Decision(ahead_of_all(gaps), head, outcome.ranking())


@dataclasses.dataclass(frozen=True)
class Lead(Against):
    """The judged arm's lead over the rival grows (sign 1) or shrinks (-1) as the depth, or the number of tokens,
    doubles; with `ahead`, it also leads at every shape."""

    along: Literal["depth", "tokens"]
    sign: int = 1
    ahead: bool = False

    def decide(self, outcome: Outcome) -> Decision:
        if not {self.judged, self.rival} <= set(outcome.arms):
            return Decision("undecided", "an arm is missing", outcome.ranking())
        gaps = {shape: outcome.gap(self.rival, self.judged, shape) for shape in outcome.shapes}
        slope = self.slope(gaps)
        verdict: Verdict = "undecided" if slope is None else same_sign(slope, self.sign)
        if self.ahead:
            verdict = both(verdict, ahead_of_all(list(gaps.values())))
        told = ", ".join(f"{shape.name} {outcome.gap_text(gap)}" for shape, gap in gaps.items())
        if len(gaps) == 1:
            head = f"{self.rival} minus {self.judged} at {told} nats; over {self.along} needs two"
        else:
            none = "a run diverged" if self._groups(gaps) else "needs two"
            shown = f"{signed(slope)} nats" if slope else none
            head = f"{self.judged}'s lead over {self.rival} per doubling of the {self.along}: {shown}"
            if self.ahead and slope and all(gap.values for gap in gaps.values()):
                head += f"; ahead at {sides(list(gaps.values())).count(1)} of {len(gaps)} shapes"
        text = f"{self.rival} minus {self.judged}: {told} nats per token{self._at_minima(outcome, gaps)}"
        return Decision(verdict, head, f"{text}; {outcome.ranking()}")

    def _at_minima(self, outcome: Outcome, gaps: Mapping[Shape, Gap]) -> str:
        """The slope that would result if each arm had the loss at its parabola's minimum instead of that at its best
        rate tried."""
        error = lambda arm, shape: outcome.tried(arm, shape).grid_error  # noqa: E731
        errors = {shape: (error(self.rival, shape), error(self.judged, shape)) for shape in gaps}
        if len(gaps) < 2 or any(None in pair for pair in errors.values()):
            return ""
        slope = self.slope({shape: gap.moved(errors[shape][1] - errors[shape][0]) for shape, gap in gaps.items()})
        return f"; per doubling without grid errors {signed(slope)}" if slope else ""

    def _groups(self, shapes: Iterable[Shape]) -> list[list[Shape]]:
        """Groups of shapes that agree in the other dimension and have two values of the one along which the lead is
        measured."""
        other = (lambda s: (s.tokens, s.width)) if self.along == "depth" else (lambda s: (s.depth, s.width))
        groups: dict[tuple, list[Shape]] = {}
        for shape in shapes:
            groups.setdefault(other(shape), []).append(shape)
        return [own for own in groups.values() if len({getattr(s, self.along) for s in own}) > 1]

    def slope(self, gaps: Mapping[Shape, Gap]) -> Interval | None:
        """The slope in nats per doubling: least squares for each fresh seed (without fresh seeds, for that of the
        tuning) at each value of the other dimension, averaged over these values. None if there are no two values, or if
        an arm diverged."""
        groups = self._groups(gaps)
        if not groups:
            return None
        seeds = set.intersection(*(set(gaps[shape].values) for own in groups for shape in own))
        value = (lambda gap, seed: gap.values[seed]) if seeds else (lambda gap, seed: gap.hint)

        def at(seed) -> float:
            fits = []
            for own in groups:
                x, y = np.log2([getattr(s, self.along) for s in own]), [value(gaps[s], seed) for s in own]
                fits.append(np.polyfit(x, y, 1)[0] if np.all(np.isfinite(y)) else np.nan)
            return float(np.mean(fits))

        slopes = [at(seed) for seed in sorted(seeds) or [None]]
        return mean_interval(slopes) if np.all(np.isfinite(slopes)) else None


@dataclasses.dataclass(frozen=True)
class Matches(Claim):
    """The arms' losses exceed the judged arm's by at most `margin`, as a share of it, at every shape. An arm with a
    divergence does not match; by rule 3 it takes several until that is more than chance."""

    arms: tuple[str, ...]
    margin: float

    @property
    def named(self) -> tuple[str, ...]:
        return self.judged, *self.arms

    def decide(self, outcome: Outcome) -> Decision:
        own = [arm for arm in self.arms if arm in outcome.arms]
        if self.judged not in outcome.arms or not own:
            return Decision("undecided", "an arm is missing", outcome.ranking())
        gaps = [(outcome.gap(arm, self.judged, shape), shape) for shape in outcome.shapes for arm in own]
        worst = max(gaps, key=lambda pair: pair[0].middle)[0]
        head = f"{worst.name} minus {self.judged}: {outcome.gap_text(worst)} nats"
        if any(gap.won > gap.lost and gap.p_of_counts < LEVEL for gap, _ in gaps):
            return Decision("not supported", head, outcome.ranking())
        limit = lambda shape: self.margin * outcome.loss(self.judged, shape).estimate  # noqa: E731
        checks = [(gap.interval, (-math.inf, limit(shape))) for gap, shape in gaps if gap.interval]
        known = len(checks) == len(gaps) and not any(gap.won for gap, _ in gaps)
        return Decision(within(checks) if known else "undecided", head, outcome.ranking())


@dataclasses.dataclass(frozen=True)
class Wall(Against):
    """At depths beyond `beyond`, the judged arm is behind the rival by more than the margin, and up to there by less. A
    divergence counts as being behind; that the rival does not diverge is part of the claim."""

    beyond: int  # blocks
    margin: float  # nats

    def decide(self, outcome: Outcome) -> Decision:
        if not {self.judged, self.rival} <= set(outcome.arms):
            return Decision("undecided", "an arm is missing", outcome.ranking())
        gaps = {shape: outcome.gap(self.judged, self.rival, shape) for shape in outcome.shapes}
        sides = [shape.depth > self.beyond for shape in gaps]
        checks = [
            (_behind(gap, deep), (self.margin, math.inf) if deep else (-math.inf, self.margin))
            for gap, deep in zip(gaps.values(), sides, strict=True)
        ]
        known = any(sides) and not all(sides) and all(one is not None for one, _ in checks)
        deepest = gaps[max(gaps, key=lambda shape: shape.depth)]
        told = ", ".join(f"{shape.name} {outcome.gap_text(gap)}" for shape, gap in gaps.items())
        text = f"{self.judged} minus {self.rival}: {told} nats per token; {outcome.ranking()}"
        head = f"{deepest.name} minus {self.rival}: {outcome.gap_text(deepest)} nats"
        return Decision(within(checks) if known else "undecided", head, text)


def _behind(gap: Gap, deep: bool) -> Interval | None:
    """By how much a wall's arm is behind, in nats; None if its rival diverged, because nobody knows. If the arm itself
    diverged, then beyond the wall the seeds that came through give a lower bound; before it, one such run counts as a
    failure."""
    if gap.lost:
        return None
    if not gap.won:
        return gap.interval
    low = gap.interval.low if deep and gap.interval else math.inf
    return Interval(math.inf, low, math.inf)


@dataclasses.dataclass(frozen=True)
class Deeper(Claim):
    """The judged arm has a lower loss at every further shape than at the first one; the other arms are only shown
    beside it."""

    def decide(self, outcome: Outcome) -> Decision:
        first, *deeper = outcome.shapes
        gaps = {(arm, shape): outcome.gain(arm, first, shape) for arm in outcome.arms for shape in deeper}
        told = ", ".join(f"{gap.name} {outcome.gap_text(gap)}" for gap in gaps.values())
        text = f"loss at {first.name} minus that of {told} nats per token; {outcome.ranking()}"
        own = [gap for (arm, _), gap in gaps.items() if arm == self.judged]
        head = f"{first.name} minus {own[-1].name}: {outcome.gap_text(own[-1])} nats" if own else f"no {self.judged}"
        return Decision(ahead_of_all(own), head, text)
