"""Differences between few, noisy runs: Welch's t-test, Student intervals, percentiles of bootstrap draws."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from scipy import stats

from nagjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Interval:
    """An estimate with the interval that covers the truth with the stated confidence."""

    estimate: float
    low: float
    high: float

    def __str__(self) -> str:
        return self.text(4)

    def text(self, digits: int) -> str:
        if math.isnan(self.estimate):
            return "no run"
        if not math.isfinite(self.low + self.high):
            return f"{self.estimate:.{digits}f} (one run)"
        return f"{self.estimate:.{digits}f} [{self.low:.{digits}f}, {self.high:.{digits}f}]"


@dataclasses.dataclass(frozen=True)
class Welch:
    """Welch's t-test of mean(a) - mean(b): two-sided p, unequal variances."""

    difference: float
    t: float
    degrees: float
    p: float


def welch(a: Sequence[float], b: Sequence[float]) -> Welch:
    """Welch's test of two samples. Raises UserError for fewer than two values in one of them."""
    if min(len(a), len(b)) < 2:
        raise UserError("seeds", min(len(a), len(b)), "a t-test needs at least 2 runs on either side")
    found = stats.ttest_ind(a, b, equal_var=False)
    return Welch(float(np.mean(a) - np.mean(b)), float(found.statistic), float(found.df), float(found.pvalue))


def mean_interval(values: Sequence[float], confidence: float = 0.95) -> Interval:
    """Student's interval of a mean; infinite for a single value, nan for none."""
    values = np.asarray(values, float)
    if not values.size:
        return Interval(math.nan, math.nan, math.nan)
    mean = float(np.mean(values))
    if values.size < 2:
        return Interval(mean, -math.inf, math.inf)
    half = stats.t.ppf(0.5 + confidence / 2, values.size - 1) * np.std(values, ddof=1) / math.sqrt(values.size)
    return Interval(mean, mean - float(half), mean + float(half))


def paired_interval(a: dict, b: dict, confidence: float = 0.95) -> Interval:
    """Student's interval of the mean of a - b over the keys (seeds) that both have: what they share, above all the data
    order, cancels."""
    shared = sorted(a.keys() & b.keys())
    if not shared:
        raise UserError("seeds", sorted(a), f"no run with these seeds on the other side, which has {sorted(b)}")
    return mean_interval([a[seed] - b[seed] for seed in shared], confidence)


def percentile_interval(estimate: float, draws: Float[np.ndarray, " samples"], confidence: float = 0.95) -> Interval:
    """The interval between percentiles of bootstrap draws, around `estimate`."""
    low, high = np.quantile(draws, [(1 - confidence) / 2, (1 + confidence) / 2])
    return Interval(float(estimate), float(low), float(high))


def power_law(x: Sequence[float], y: Sequence[float]) -> tuple[float, float]:
    """The exponent a and the factor c of y = c * x ** -a, by least squares in the logarithms."""
    slope, intercept = np.polyfit(np.log(x), np.log(y), 1)
    return -float(slope), float(np.exp(intercept))
