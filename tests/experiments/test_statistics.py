import math

import numpy as np
import pytest

from experiments.harness.statistics import (
    mean_interval,
    paired_interval,
    percentile_interval,
    power_law,
    welch,
)
from nagjax.errors import UserError


def test_welch_by_hand():
    # Unequal variances: var/n = 1/3 and 16/3, so t = (2 - 6) / sqrt(17/3), Welch-Satterthwaite in closed form.
    a, b = [1.0, 2.0, 3.0], [2.0, 6.0, 10.0]
    found = welch(a, b)
    first, second = 1 / 3, 16 / 3
    np.testing.assert_allclose(found.t, -4 / math.sqrt(first + second))
    np.testing.assert_allclose(found.degrees, (first + second) ** 2 / (first**2 / 2 + second**2 / 2))
    assert found.difference == -4 and 0.2 < found.p < 0.25


def test_intervals_by_hand():
    found = mean_interval([1.0, 2.0, 3.0])
    np.testing.assert_allclose([found.low, found.high], 2 + np.array([-1, 1]) * 4.302653 / math.sqrt(3), rtol=1e-6)
    paired = paired_interval({0: 1.5, 1: 2.5, 7: 9.0}, {0: 1.0, 1: 2.0, 2: 0.0})
    assert paired.estimate == paired.low == paired.high == 0.5  # the spread between seeds cancels
    assert mean_interval([4.0]).high == math.inf and "one run" in str(mean_interval([4.0]))
    assert str(mean_interval([])) == "no run"
    with pytest.raises(UserError, match="seeds"):
        paired_interval({0: 1.0}, {1: 1.0})
    with pytest.raises(UserError, match="at least 2"):
        welch([1.0], [1.0, 2.0])


def test_percentiles_of_normal_draws_are_the_interval_of_their_mean():
    interval = percentile_interval(0.0, np.random.default_rng(1).normal(size=20_000))
    np.testing.assert_allclose([interval.low, interval.high], [-1.96, 1.96], rtol=0.05)


def test_power_law():
    exponent, factor = power_law([1, 2, 4], [3.0, 1.5, 0.75])
    np.testing.assert_allclose([exponent, factor], [1.0, 3.0])
