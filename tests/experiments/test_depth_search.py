"""The search: what is drawn, what is chosen, and that the chosen setting is the one confirmed."""

import dataclasses
import json

import pytest

from experiments.depth_search import COMMON, SIZES, SPACES, Settings, plan, summarise
from experiments.harness.jobs import Record
from experiments.harness.searching import Confirmation, best, drawn


def test_the_defaults_come_first_and_no_draw_twice():
    space = {"a": (1, 2), "b": ("x", "y", "z")}
    found = drawn(space, 6, seed=3)
    assert found[0] == {"a": 1, "b": "x"} and len({json.dumps(one) for one in found}) == 6
    assert drawn(space, 99, seed=3) == found  # there are no more
    assert drawn(space, 3, seed=3) == found[:3] and drawn(space, 6, seed=4) != found


def test_schemes_get_the_same_budget_and_seeds_no_trial_had():
    jobs = plan(SIZES["cpu"])
    trials = [job for job in jobs if job.labels["part"] == "trial"]
    drawn_for = [job.labels["scheme"] for job in trials]
    assert {scheme: drawn_for.count(scheme) for scheme in SPACES} == dict.fromkeys(SPACES, SIZES["cpu"].trials)
    assert {job.run_config.train.seed for job in trials} == {0}
    assert {one.run_config.train.seed for job in jobs[len(trials) :] for one in job.seeded} == {1, 2, 3}
    first = next(job for job in trials if job.labels["scheme"] == "nag").run_config.scheme
    assert (first.alpha_power, first.ramp, first.head_gain) == (0.5, 0.05, 1.0)
    assert set(COMMON) | set(SPACES["nag"][1]) == set(trials[1].labels["options"])


def test_a_space_with_fewer_trials_is_searched_whole():
    jobs = plan(SIZES["paper"])
    found = [job.labels["scheme"] for job in jobs if job.labels["part"] == "trial"]
    assert {scheme: found.count(scheme) for scheme in SPACES} == {"plain": 36, "nag": 36, "rezero": 5 * 2 * 3}


class Trial:
    """Writes a loss without training."""

    def __init__(self, name, loss, shift=0.0):
        self.name, self.labels, self.loss, self.shift = name, {}, loss, shift

    def config(self):
        return {"loss": self.loss}

    def run(self, folder):
        return {"loss": None if self.loss is None else self.loss + self.shift}


def test_a_confirmation_does_the_missing_trials_and_repeats_the_best(tmp_path):
    losses = {"a": 3.0, "b": 2.0, "c": None}
    trials = tuple(Trial(name, loss) for name, loss in losses.items())
    fresh = tuple(Trial(name, loss, 0.5) for name, loss in losses.items())
    job = Confirmation("best", {}, trials, fresh)
    assert job.run(tmp_path / "best") == {"loss": 2.5, "trial": "b"}
    assert (tmp_path / "a" / "record.json").exists()
    hopeless = Confirmation("best", {}, trials[2:], fresh[2:])
    assert hopeless.run(tmp_path / "best")["loss"] is None


def records(lead):
    found = []
    for scheme, loss in (("plain", 3.0), ("nag", 3.0 - lead)):
        found += [
            Record(f"{scheme}-{i}", {"scheme": scheme, "part": "trial", "options": {"rate": r}}, {}, {"loss": value})
            for i, (r, value) in enumerate([(1.0, loss + 0.1), (2.0, loss), (4.0, None)])
        ]
        found += [
            Record("", {"scheme": scheme, "part": "confirmation", "seed": s}, {}, {"loss": loss + 0.01 * s})
            for s in (1, 2)
        ]
    return found


@pytest.mark.parametrize("lead, verdict", [(0.2, "supported"), (-0.2, "not supported"), (0.0, "undecided")])
def test_the_verdict_is_on_fresh_seeds(lead, verdict):
    own = records(lead)
    assert best(own[:3]).labels["options"] == {"rate": 2.0}
    summary = summarise(Settings(2, 16, 16, 8, 4, 3, 2), own)
    assert summary.verdict == verdict
    assert "plain 3.0150" in summary.measured and "with rate 2.0" in summary.measured
    assert [row["loss"] for row in summary.table[:3]] == [3.0, 3.1, "diverged"]


def test_one_trial_is_no_search_and_runs_of_another_trial_than_the_best_are_of_another():
    own = records(0.2)
    assert summarise(Settings(2, 16, 16, 8, 4, 1, 2), own).reasons == ["rates not tuned"]
    for record in own:
        if record.labels["part"] == "confirmation":
            record.metrics["trial"] = f"{record.labels['scheme']}-1"
    assert summarise(Settings(2, 16, 16, 8, 4, 3, 2), own).verdict == "supported"
    own[-1].metrics["trial"] = "nag-0"
    summary = summarise(Settings(2, 16, 16, 8, 4, 3, 2), own)
    assert (summary.verdict, summary.reasons) == ("undecided", ["nag has runs of another trial than its best"])


@pytest.mark.parametrize("rate, edge", [(4.0, ["nag"]), (0.25, ["nag"]), (2.0, [])])
def test_a_best_trial_at_an_extreme_rate_is_at_the_edge(rate, edge):
    own = records(0.2)
    trial = next(r for r in own if r.labels["scheme"] == "nag" and r.labels.get("options") == {"rate": 2.0})
    trial.labels["options"]["rate"] = rate
    assert summarise(Settings(2, 16, 16, 8, 4, 3, 2), own).details["at_the_grid_edge"] == edge


def test_a_fresh_seed_that_diverged_is_told():
    own = records(0.2)
    last = next(r for r in reversed(own) if r.labels["scheme"] == "nag" and r.labels["part"] == "confirmation")
    own[own.index(last)] = dataclasses.replace(last, metrics={"loss": None})
    measured = summarise(Settings(2, 16, 16, 8, 4, 3, 2), own).measured
    assert "nag 2.8100 (one run) (1 diverged)" in measured and "plain minus NAG +0.200 (1 diverged)" in measured
