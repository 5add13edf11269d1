"""What a verdict takes: one set of rules for all recipes.

1. Seeds. A difference is paired by seed, over at least SEEDS fresh ones: where rates are tuned, never the seed on which
   they were.
2. Rivals. Every comparison a claim makes is in one family; its p values (paired t tests, two-sided) are Holm's, who
   bounds the chance of one false finding as Bonferroni does and finds more.
3. Divergence. An arm of which a run diverged is never ahead, whatever the rival's did. Pairs of which one diverged have
   no difference and stay out of the interval, but not out of the count. Where there are such, p is twice the smaller of
   two: the t test's over the pairs both came through, PAIRS at least, and Fisher's exact one of how many diverged.
4. Rates. What is trained apart is compared at tuned rates, of which the best is inside the grid: a neighbour on either
   side is worse, or diverges; in a random search it is neither the smallest nor the largest there was to draw. Within
   one trained model there is nothing to tune.
5. Floor. The best arm is below the 4-gram table of the same training text.
6. Arms. All that the claim is about were run, every run at the rate that the trials beside it chose, and equal in what
   the claim says, tokens or FLOPs.
7. Text. Runs that are compared have read one text, not two of one name.
8. Curves. A verdict read off curves between points is the same by straight lines and by monotone cubics.

A claim that the differences decide, and that fails 1 or one of 4 to 8, is undecided, with the reasons told. A claim of
several parts that has to hold in each (`within`, `both`) is supported if each does at 5%, which needs no correction;
that one part fails is told at 5% for that part alone.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
from scipy import stats

from experiments.harness.statistics import Interval, mean_interval

Verdict = Literal["supported", "not supported", "undecided"]
SEEDS = 5
LEVEL = 0.05  # of a family of comparisons
PAIRS = 3  # without divergences rule 1 already requires more
UNTUNED = "rates not tuned"


@dataclasses.dataclass(frozen=True)
class Gap:
    """A rival's loss minus the judged arm's (nats), by fresh seed: infinite if the rival diverged, minus infinite if
    the judged arm did, nan if both did."""

    name: str
    values: Mapping[int, float]
    hint: float = math.nan  # the difference on the seed on which rates were chosen; never evidence

    @classmethod
    def of(cls, name: str, rival: Mapping[int, float | None], judged: Mapping[int, float | None]) -> "Gap":
        """Made from losses by seed; None: the run diverged."""
        number = lambda loss: math.inf if loss is None else loss  # noqa: E731
        return cls(
            name, {seed: number(rival[seed]) - number(judged[seed]) for seed in sorted(rival.keys() & judged.keys())}
        )

    def moved(self, by: float) -> "Gap":
        """The gap with every difference and the hint increased by `by`."""
        values = {seed: value + by for seed, value in self.values.items()}
        return dataclasses.replace(self, values=values, hint=self.hint + by)

    @property
    def finite(self) -> list[float]:
        return [value for value in self.values.values() if math.isfinite(value)]

    @property
    def won(self) -> int:
        """The number of seeds on which the rival diverged, whether or not the judged arm did."""
        return sum(value == math.inf or math.isnan(value) for value in self.values.values())

    @property
    def lost(self) -> int:
        """The number of seeds on which the judged arm diverged, whether or not the rival did."""
        return sum(value == -math.inf or math.isnan(value) for value in self.values.values())

    @property
    def interval(self) -> Interval | None:
        """Student's 95% interval over the seeds on which neither diverged."""
        return mean_interval(self.finite) if self.finite else None

    @property
    def middle(self) -> float:
        """The mean; if there is none, the sign that divergences indicate, or the hint."""
        if self.interval is not None:
            return self.interval.estimate
        return math.inf if self.won > self.lost else -math.inf if self.lost > self.won else self.hint

    @property
    def p(self) -> float:
        """The p value of no difference; 1 if nothing is known."""
        if not (self.won or self.lost):
            return self._t_test(2)
        return min(1.0, 2 * min(self.p_of_counts, self._t_test(PAIRS)))

    @property
    def p_of_counts(self) -> float:
        """Fisher's exact p value of as many divergences on either side."""
        came = [len(self.values) - self.won, len(self.values) - self.lost]
        return float(stats.fisher_exact([[self.won, self.lost], came]).pvalue)

    def _t_test(self, least: int) -> float:
        """The t test's p value over the pairs in which neither run diverged, if there are `least` of them."""
        if len(self.finite) < least:
            return 1.0
        mean, error = np.mean(self.finite), np.std(self.finite, ddof=1) / math.sqrt(len(self.finite))
        if error == 0:
            return 1.0 if mean == 0 else 0.0
        return float(2 * stats.t.sf(abs(mean / error), len(self.finite) - 1))

    def __str__(self) -> str:
        if not self.values:
            return "no common seed"
        shown = signed(self.interval) if self.interval else "diverged"
        counts = [f"{count} {text}" for count, text in ((self.won, "rival diverged"), (self.lost, "diverged")) if count]
        return f"{shown} ({', '.join(counts)})" if counts and self.interval else shown


def signed(one: Interval, digits: int = 3) -> str:
    spread = f" [{one.low:+.{digits}f}, {one.high:+.{digits}f}]" if math.isfinite(one.high - one.low) else ""
    return f"{one.estimate:+.{digits}f}{spread}"


def holm(p: Sequence[float]) -> list[float]:
    """Adjusted p values by Holm 1979."""
    order, adjusted, running = np.argsort(p, kind="stable"), [0.0] * len(p), 0.0
    for rank, index in enumerate(order):
        running = max(running, min(1.0, (len(p) - rank) * p[index]))
        adjusted[index] = running
    return adjusted


def sides(gaps: Sequence[Gap]) -> list[int]:
    """For each gap of a family: 1 if the judged arm is ahead, -1 if the rival is, 0 if it is undecided."""
    found = []
    for gap, p in zip(gaps, holm([gap.p for gap in gaps]), strict=True):
        mean = gap.interval.estimate if gap.interval else gap.won - gap.lost
        ahead, behind = p < LEVEL and mean > 0 and not gap.lost, p < LEVEL and mean < 0 and not gap.won
        found.append(1 if ahead else -1 if behind else 0)
    return found


def ahead_of_all(gaps: Sequence[Gap]) -> Verdict:
    """Supported if ahead of every rival everywhere, not supported if behind one somewhere."""
    found = sides(gaps)
    if -1 in found:
        return "not supported"
    return "supported" if found and all(side == 1 for side in found) else "undecided"


def same_sign(slope: Interval, sign: int) -> Verdict:
    """The verdict on whether a slope has the given sign."""
    low, high = sorted((sign * slope.low, sign * slope.high))
    return "supported" if low > 0 else "not supported" if high < 0 else "undecided"


def within(checks: Sequence[tuple[Interval, tuple[float, float]]]) -> Verdict:
    """Supported if every interval is inside its bounds, not supported if one is completely outside."""
    if any(one.high < low or one.low > high for one, (low, high) in checks):
        return "not supported"
    inside = bool(checks) and all(low <= one.low and one.high <= high for one, (low, high) in checks)
    return "supported" if inside else "undecided"


def both(first: Verdict, second: Verdict) -> Verdict:
    """The verdict on a claim of two parts."""
    if "not supported" in (first, second):
        return "not supported"
    return "supported" if first == second == "supported" else "undecided"


STEADY = 0.1  # the change of an exponent, as the steps doubled, below which it has settled


def unsettled(name: str, exponent: Interval, at_half: Interval | None) -> str:
    """Why an exponent in depth may hold only for this budget; "" if it stayed the same as the steps doubled."""
    if at_half is None:
        return f"{name}: one budget, an exponent grows with the steps"
    moved = exponent.estimate - at_half.estimate
    return f"{name}: moved by {moved:+.2f} as the steps doubled" if abs(moved) >= STEADY else ""


def few(count: int, what: str) -> list[str]:
    """Why nothing is decided with so few fresh seeds, or teachers of students; those on which a rate was chosen do not
    count."""
    return [f"{count} fresh {what}, {SEEDS} needed"] if count < SEEDS else []


def barred(seeds: int, edges: Sequence[str], above_floor: bool | None, tuned: bool) -> list[str]:
    """Why nothing is decided, whatever the differences say. `above_floor` None: there is no text and so no floor.
    `tuned`: the rates were tuned, or nothing is compared that was trained separately."""
    reasons = few(seeds, "seeds")
    reasons += [] if tuned else [UNTUNED]
    reasons += [f"best rate at the grid's edge: {', '.join(edges)}"] if edges else []
    return reasons + (["above the 4-gram table"] if above_floor else [])
