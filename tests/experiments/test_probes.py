import dataclasses

import numpy as np
import pytest

from experiments.harness.jobs import Record
from experiments.harness.recipe import load
from experiments.harness.statistics import Interval
from experiments.inverse_depth_probes import Settings, between_ends, draws, exponent, middle, summarise, verdict
from tests.tolerance import close_to

RIGHT = np.pi / 2
SETTINGS = Settings((6, 12, 24), 16, 16, 8, 4, 2)


def record(depth, seed, *, middle=lambda depth: 3.0 / depth, last=RIGHT, between=RIGHT, start=0.1, **labels):
    turn = [RIGHT, *[middle(depth)] * (depth - 2), last]
    metrics = {"scheme": "plain", "depth": depth, "turn": [turn, turn], "between": [[between] * (depth - 1)] * 2}
    metrics |= {"start": [start] * depth, "exits": [[0, 3.0], [depth - 1, 2.0]]}
    return Record("", labels or {"seed": seed}, {}, metrics)


def records(**planted):
    return [record(depth, seed, **planted) for depth in SETTINGS.depths for seed in (0, 1)]


def test_middles():
    assert middle([9.0, 9, 1, 2, 3, 4, 9, 9]) == middle([9.0, 2, 3, 9]) == 2.5
    assert middle([1.0]) == 1 and middle([1.0, 2.0]) == between_ends([1.0, 2.0]) == 1.5
    assert between_ends([9.0, 1, 2, 9]) == 1.5


def test_exponents_of_planted_turns():
    found = draws(records(), "plain")
    assert list(found) == [6, 12, 24] and [len(own) for own in found.values()] == [2, 2, 2]
    for read in (middle, between_ends):
        np.testing.assert_allclose(exponent(found, read).estimate, 1.0)
    np.testing.assert_allclose(exponent(found, middle, "start").estimate, 0.0, atol=1e-9)
    half = draws(records(middle=lambda depth: depth**-0.5), "plain")
    np.testing.assert_allclose(exponent(half, middle).estimate, 0.5)
    assert exponent({6: found[6]}, middle) is None
    # Of models that were not trained here the draws are batches, and there is no start.
    given = draws([record(depth, 0, run="x") for depth in SETTINGS.depths], "plain")
    assert [len(own) for own in given.values()] == [2, 2, 2] and exponent(given, middle, "start") is None


def test_draws_go_together_by_seed():
    """Of a seed that diverged at one depth the profiles at the others have no partner."""
    factor = {0: 1.0, 1: 2.0, 2: 4.0}
    own = [
        record(depth, seed, middle=lambda depth, by=factor[seed]: by / depth)
        for depth in SETTINGS.depths
        for seed in factor
        if (depth, seed) != (24, 0)
    ]
    found = draws(own, "plain")
    assert [sorted(by_seed) for by_seed in found.values()] == [[0, 1, 2], [0, 1, 2], [1, 2]]
    np.testing.assert_allclose(dataclasses.astuple(exponent(found, middle)), 1.0)
    assert exponent({6: {0: found[6][0]}, 24: found[24]}, middle) is None
    # Two given models of one depth: no batch takes another's place.
    twice = [record(6, 0, run="a"), record(6, 0, run="b")]
    assert list(draws(twice, "plain")[6]) == [0, 1, 2, 3]


def test_verdicts():
    assert summarise(SETTINGS, records()).verdict == "supported"
    for wrong in ({"middle": lambda depth: depth**-0.5}, {"last": 0.3}, {"between": 0.5}):
        assert summarise(SETTINGS, records(**wrong)).verdict == "not supported"
    assert verdict(draws(records(), "plain"), Interval(1.0, 0.5, 1.5)) == "undecided"
    assert verdict(draws(records(), "plain"), None) == "undecided"
    given = summarise(dataclasses.replace(SETTINGS, runs=("a", "b")), records())
    assert given.verdict == "undecided" and "not over seeds" in given.reasons[0]
    diverged = Record("", {"seed": 0}, {}, {"diverged": "", "loss": None})
    assert summarise(SETTINGS, [diverged]).verdict == "undecided"


def test_what_is_measured_is_told_of_the_scheme_that_is_judged():
    measured = summarise(SETTINGS, records(last=0.5)).measured
    assert "middle plain 1.00" in measured and "at the start plain" in measured
    assert "degrees 6: 90 / 29 / 90, 12: 90" in measured


def test_looking_at_a_run_that_is_there(tmp_path):
    recipe = load("inverse_depth_probes")
    settings = recipe.settings("smoke")
    own = dataclasses.replace(recipe.plan(settings)[0], after=None).run(tmp_path / "run")
    (look,) = recipe.plan(dataclasses.replace(settings, runs=(str(tmp_path / "run"),)))
    seen = look.run(tmp_path)
    assert (seen["scheme"], seen["depth"]) == ("nag", 3) and [block for block, _ in seen["exits"]] == [0, 1, 2]
    loss = close_to(own["loss"], terms=64, chain=24)
    assert seen["exits"][-1][1] == loss != seen["exits"][0][1]  # nothing is left out
    assert np.shape(seen["turn"]) == (1, 3) and np.shape(seen["between"]) == (1, 2)
    assert seen["to_end"][-1] == pytest.approx(0, abs=1e-3) and seen["progress"][-1] == pytest.approx(1, abs=1e-4)
    assert seen["to_end"][-2] == pytest.approx(seen["turn"][0][-1], rel=1e-4)
    assert summarise(settings, [Record("", look.labels, {}, seen)]).verdict == "undecided"
