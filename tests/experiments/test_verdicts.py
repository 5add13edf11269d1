"""The rules of a verdict, one by one, and Holm's correction by hand."""

import math

import pytest
from scipy import stats

from experiments.harness.statistics import Interval
from experiments.harness.verdicts import Gap, ahead_of_all, barred, both, holm, same_sign, sides, unsettled, within

SURE = {seed: 0.1 + 0.001 * seed for seed in range(1, 6)}
LEVEL = {1: 0.1, 2: -0.1, 3: 0.2, 4: -0.2, 5: 0.01}


def against(gap: dict[int, float | None]) -> Gap:
    """The comparison with a rival that is this far behind an arm with loss 2."""
    return Gap.of("rival", {s: None if g is None else 2 + g for s, g in gap.items()}, dict.fromkeys(gap, 2.0))


def test_p_is_that_of_the_paired_t_test():
    values = [0.3, 0.1, 0.2, -0.1, 0.25]
    gap = against(dict(enumerate(values, 1)))
    assert gap.p == pytest.approx(stats.ttest_1samp(values, 0.0).pvalue)
    assert Gap("", {1: 0.5}).p == Gap("", {}).p == 1.0


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0] and holm([]) == []


def test_more_rivals_need_more_evidence():
    almost = against({1: 0.10, 2: 0.02, 3: 0.08, 4: 0.01, 5: 0.06})
    assert 0.01 < almost.p < 0.05
    assert sides([almost]) == [1] and sides([almost] * 5) == [0] * 5


def test_ahead_of_all():
    ahead, level, behind = against(SURE), against(LEVEL), against({s: -g for s, g in SURE.items()})
    assert ahead_of_all([ahead, ahead]) == "supported"
    assert ahead_of_all([ahead, level]) == ahead_of_all([]) == "undecided"
    assert ahead_of_all([ahead, behind]) == "not supported"


def test_a_divergence_is_a_loss():
    rival_diverged = against(SURE | {5: None})
    assert rival_diverged.won == 1 and rival_diverged.lost == 0 and len(rival_diverged.finite) == 4
    assert ahead_of_all([rival_diverged]) == "supported" and "1 rival diverged" in str(rival_diverged)
    own = Gap.of("rival", dict.fromkeys(SURE, 2.1), {s: None if s == 1 else 2.0 - 0.001 * s for s in SURE})
    assert own.lost == 1 and ahead_of_all([own]) == "undecided"  # ahead on the seeds it came through, and yet
    always = Gap.of("rival", dict.fromkeys(SURE, 2.1), dict.fromkeys(SURE))
    assert ahead_of_all([always]) == "not supported" and str(always) == "diverged"
    assert Gap.of("", dict.fromkeys(SURE), dict.fromkeys(SURE)).p == 1.0


def test_where_runs_diverged_p_is_of_their_number_or_of_at_least_three_pairs():
    """Fisher's exact p of 5 of 5 against none is 2 / 252, of 4 of 5 12 / 252; Holm's takes it from there."""
    fallen = lambda *seeds: against(SURE | dict.fromkeys(seeds))  # noqa: E731
    assert fallen(1, 2, 3, 4, 5).p == pytest.approx(2 * 2 / 252)
    assert fallen(1, 2, 3, 4).p == pytest.approx(2 * 12 / 252)
    assert fallen(1, 2, 3).p == pytest.approx(2 * 42 / 252)  # two pairs are left: a t test of one degree of freedom
    assert fallen(1, 2).p == pytest.approx(2 * stats.ttest_1samp([SURE[s] for s in (3, 4, 5)], 0.0).pvalue)
    assert sides([fallen(1, 2, 3, 4, 5)]) == [1] and sides([fallen(1, 2, 3, 4, 5)] * 4) == [0] * 4


@pytest.mark.parametrize("together", (range(5, 6), range(2, 6), range(1, 6)), ids=("once", "four times", "always"))
def test_an_arm_that_diverged_is_not_ahead_of_one_that_diverged_too(together):
    """Nor is the other, whatever the seeds say on which both, or one of them, came through."""
    lost = dict.fromkeys(together)
    judged, rival = dict.fromkeys(SURE, 2.0) | lost, {s: 2.0 + gap for s, gap in SURE.items()}
    for other in (rival | lost, dict.fromkeys(SURE)):
        for gap in (Gap.of("rival", other, judged), Gap.of("rival", judged, other)):
            assert ahead_of_all([gap]) == "undecided" and sides([gap]) == [0]
            assert gap.lost >= len(lost) and gap.won >= len(lost)


def test_slopes_bounds_and_parts():
    up, flat = Interval(0.1, 0.05, 0.15), Interval(0.0, -0.1, 0.1)
    assert same_sign(up, 1) == "supported" and same_sign(up, -1) == "not supported"
    assert same_sign(flat, 1) == "undecided"
    assert within([(up, (0.0, 0.2))]) == "supported" and within([(up, (0.2, 0.3))]) == "not supported"
    assert within([(flat, (-0.05, math.inf))]) == within([]) == "undecided"
    assert both("supported", "undecided") == "undecided" and both("supported", "not supported") == "not supported"


def test_what_bars_a_verdict():
    assert barred(5, [], False, True) == barred(5, [], None, True) == []
    assert barred(5, [], False, False) == ["rates not tuned"]
    assert len(barred(4, ["nag 64"], True, False)) == 4


def test_an_exponent_is_of_the_budget_until_the_steps_doubled():
    one = Interval(0.78, 0.7, 0.8)
    assert "one budget" in unsettled("independent", one, None)
    assert "moved by +0.30" in unsettled("independent", one, Interval(0.48, 0.4, 0.5))
    assert "moved by -0.20" in unsettled("independent", one, Interval(0.98, 0.9, 1.0))
    assert unsettled("independent", one, Interval(0.75, 0.7, 0.8)) == ""
