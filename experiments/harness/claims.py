"""What a comparison can claim of its arms, and how the differences between them decide it."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Literal

import numpy as np

from experiments.harness.outcome import Outcome
from experiments.harness.settings import Shape
from experiments.harness.statistics import Interval, mean_interval
from experiments.harness.verdicts import Gap, Verdict, ahead_of_all, both, same_sign, sides, signed, within


@dataclasses.dataclass(frozen=True)
class Decision:
    """`headline`: the one number that matters, with its interval."""

    verdict: Verdict
    headline: str
    told: str


@dataclasses.dataclass(frozen=True)
class Claim:
    """About one arm, whose `decide` says what became of it."""

    judged: str

    @property
    def named(self) -> tuple[str, ...]:
        """The arms it names; all are in the recipe."""
        return (self.judged,)

    def about(self, arms: tuple[str, ...]) -> tuple[str, ...]:
        """Those of the recipe's arms without which a size decides nothing."""
        return self.named

    @property
    def reference(self) -> str:
        """The arm that tables and figures show differences to."""
        return self.judged

    def decide(self, outcome: Outcome) -> Decision:
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Against(Claim):
    """About one arm and another, to which differences are shown."""

    rival: str

    @property
    def named(self) -> tuple[str, ...]:
        return self.judged, self.rival

    @property
    def reference(self) -> str:
        return self.rival


@dataclasses.dataclass(frozen=True)
class Lowest(Claim):
    """The judged arm's loss is below that of every rival at every shape."""

    rivals: tuple[str, ...] = ()  # none: all other arms

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
    """The judged arm's lead over the rival grows (sign 1) or shrinks (-1) as the depth, or the tokens, double; with
    `ahead`, it is also there at every shape."""

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
        """The slope, were each rate not the best of its grid but that of its parabola's minimum."""
        error = lambda arm, shape: outcome.tried(arm, shape).grid_error  # noqa: E731
        errors = {shape: (error(self.rival, shape), error(self.judged, shape)) for shape in gaps}
        if len(gaps) < 2 or any(None in pair for pair in errors.values()):
            return ""
        slope = self.slope({shape: gap.moved(errors[shape][1] - errors[shape][0]) for shape, gap in gaps.items()})
        return f"; per doubling without grid errors {signed(slope)}" if slope else ""

    def _groups(self, shapes: Iterable[Shape]) -> list[list[Shape]]:
        """Of shapes alike in the other dimension, those in which what the lead is along has two values."""
        other = (lambda s: (s.tokens, s.width)) if self.along == "depth" else (lambda s: (s.depth, s.width))
        groups: dict[tuple, list[Shape]] = {}
        for shape in shapes:
            groups.setdefault(other(shape), []).append(shape)
        return [own for own in groups.values() if len({getattr(s, self.along) for s in own}) > 1]

    def slope(self, gaps: Mapping[Shape, Gap]) -> Interval | None:
        """Nats per doubling: least squares for each seed (with fresh ones none: the tuning's own) at each value of the
        other dimension, averaged over these. None without two values, or where one of the two diverged."""
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
    """The arms' losses are at most `margin` (a share of it) above the judged one's, at every shape."""

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
        if any(math.inf in gap.values.values() for gap, _ in gaps):  # it diverged where the one to be matched did not
            return Decision("not supported", head, outcome.ranking())
        limit = lambda shape: self.margin * outcome.loss(self.judged, shape).estimate  # noqa: E731
        checks = [(gap.interval, (-math.inf, limit(shape))) for gap, shape in gaps if gap.interval]
        known = len(checks) == len(gaps) and not any(gap.won for gap, _ in gaps)
        return Decision(within(checks) if known else "undecided", head, outcome.ranking())


@dataclasses.dataclass(frozen=True)
class Wall(Against):
    """Beyond a depth the judged arm is behind the rival by more than the margin, and up to it by less. To diverge is to
    be behind; that the rival does not is part of the claim."""

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
    """How far a wall's arm is behind; None where its rival diverged: nobody knows. Where the arm did, the seeds that
    came through say how far at least, beyond the wall; before it one such run is a failure out of place."""
    if gap.lost:
        return None
    if not gap.won:
        return gap.interval
    low = gap.interval.low if deep and gap.interval else math.inf
    return Interval(math.inf, low, math.inf)


@dataclasses.dataclass(frozen=True)
class Deeper(Claim):
    """The judged arm has a lower loss at every further shape than at the first one; the other arms stand beside it."""

    def decide(self, outcome: Outcome) -> Decision:
        first, *deeper = outcome.shapes
        gaps = {
            (arm, shape): Gap.of(f"{arm} at {shape.name}", outcome.losses(arm, first), outcome.losses(arm, shape))
            for arm in outcome.arms
            for shape in deeper
        }
        told = ", ".join(f"{gap.name} {outcome.gap_text(gap)}" for gap in gaps.values())
        text = f"loss at {first.name} minus that of {told} nats per token; {outcome.ranking()}"
        own = [gap for (arm, _), gap in gaps.items() if arm == self.judged]
        head = f"{first.name} minus {own[-1].name}: {outcome.gap_text(own[-1])} nats" if own else f"no {self.judged}"
        return Decision(ahead_of_all(own), head, text)
