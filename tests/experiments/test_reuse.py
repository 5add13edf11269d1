"""What result files hold is not done again, and writing one loses nothing that another command has done."""

import dataclasses
import functools
import json
from pathlib import Path

import pytest

from experiments.harness import command
from experiments.harness.jobs import RECORD, Job, Record, Training, changed, finished
from experiments.harness.rates import Tuning
from experiments.harness.recipe import load, planned
from experiments.harness.results import Summary, read_result, unfinished_file, write_result, write_unfinished
from experiments.harness.reuse import check_kept, check_unfinished, done, recorded, reuse
from experiments.harness.settings import Settings
from experiments.harness.sweep import collect, work
from nagjax.errors import UserError
from nagjax.model.config import ModelConfig
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig
from tests.experiments.test_sweep import Count, _times


def _written(home: Path, jobs: list[Job], write=write_result) -> Path:
    records = [finished(job, home / "jobs") for job in jobs]
    more = [Summary("m", "undecided")] if write is write_result else [[]]
    return write(home, "tried", "cpu", "command", Settings((), 1), records, *more)


@pytest.mark.parametrize("write", [write_result, write_unfinished])
def test_jobs_of_a_result_file_are_not_done_again(write, tmp_path):
    trained = Training("run", {"seed": 3}, RunConfig(find_scheme("nag")(), ModelConfig(depth=2, width=16)))
    jobs = [Count("old"), trained, Count("new")]
    for job, metrics in ((jobs[0], {"loss": 1.0}), (trained, {"loss": 2.0})):
        own = tmp_path / "jobs" / job.name / RECORD
        own.parent.mkdir(parents=True)
        own.write_text(json.dumps(dataclasses.asdict(Record(job.name, job.labels, job.config(), metrics))))
    _written(tmp_path, jobs[:2], write)
    out = tmp_path / "out"
    assert reuse([tmp_path], "tried", "cpu", jobs, out) == 2
    work([jobs[0], jobs[2]], out)
    assert [_times(out, job) for job in (jobs[0], jobs[2])] == [0, 1]
    assert [record.metrics["loss"] for record in collect(jobs, out)] == [1.0, 2.0, 1.0]
    assert reuse([tmp_path], "another", "tried.cpu", jobs, tmp_path / "another") == 2


def test_a_result_file_of_other_jobs_is_refused(tmp_path):
    jobs, out = [Count("a"), Count("b")], tmp_path / "out"
    work(jobs, tmp_path / "jobs")
    with pytest.raises(UserError, match="name a size that was run"):
        reuse([tmp_path], "tried", "cpu", jobs, out)
    _written(tmp_path, jobs)
    with pytest.raises(UserError, match="b is of another experiment: value was 1 and is now 2"):
        reuse([tmp_path], "tried", "cpu", [Count("a"), Count("b", 2)], out)
    with pytest.raises(UserError, match="no run of this plan; its runs are a, b"):
        reuse([tmp_path], "tried", "cpu", [Count("c")], out)
    assert not out.exists()


def test_a_result_takes_the_place_of_what_was_unfinished(tmp_path):
    jobs = [Count("a"), Count("b")]
    work(jobs, tmp_path / "jobs")
    part = _written(tmp_path, jobs[:1], write_unfinished)
    assert [record.name for record in read_result(part)["records"]] == ["a"]
    _written(tmp_path, jobs)
    assert not part.exists()


def test_the_command_keeps_what_is_finished_and_does_nothing(tmp_path, capsys):
    jobs = planned(load("inverse_depth_fit"), load("inverse_depth_fit").settings("smoke"))
    options = ["--size", "smoke", "--out", str(tmp_path / "out"), "--results", str(tmp_path)]
    with pytest.raises(SystemExit):
        command.main("inverse_depth_fit.py", [*options, "--keep"])
    assert "no job is finished there" in capsys.readouterr().err
    work(jobs[:1], tmp_path / "out")
    command.main("inverse_depth_fit.py", [*options, "--keep"])
    kept = read_result(unfinished_file(tmp_path, "inverse_depth_fit", "smoke"))
    assert [record.name for record in kept["records"]] == [jobs[0].name]
    assert collect(jobs, tmp_path / "out") is None or len(jobs) == 1


def test_what_is_kept_stays_beside_what_was_kept_before(tmp_path):
    """The same size may be run with other settings: fewer jobs, or further seeds of a finished one."""
    jobs = [Count("a"), Count("b"), Count("c")]
    work(jobs, tmp_path / "jobs")
    part = _written(tmp_path, jobs[:2], write_unfinished)
    _written(tmp_path, jobs[1:], write_unfinished)
    assert {*recorded([tmp_path], "tried", "cpu")} == {"a", "b", "c"}
    _written(tmp_path, jobs[:2])  # a result without c
    assert part.exists() and reuse([tmp_path], "tried", "cpu", jobs, tmp_path / "out") == 3
    _written(tmp_path, jobs)
    assert not part.exists()


@pytest.mark.parametrize("act", [check_kept, check_unfinished])
def test_what_was_kept_with_other_settings_is_not_replaced(act, tmp_path):
    work([Count("a"), Count("b")], tmp_path / "jobs")
    _written(tmp_path, [Count("a"), Count("b")], write_unfinished)
    act(tmp_path, "tried", "cpu", [Count("a"), Count("c", 2)])
    with pytest.raises(UserError, match="b is of another experiment: value was 1 and is now 2; give another --results"):
        act(tmp_path, "tried", "cpu", [Count("a"), Count("b", 2)])


def test_runs_of_another_recipe_of_which_nothing_says_what_was_measured_are_not_reused(tmp_path):
    job = Training("run", {}, RunConfig(find_scheme("nag")(), ModelConfig(depth=2, width=16)), done)
    config = {name: own for name, own in job.config().items() if name != "after"}
    write_result(
        tmp_path, "tried", "cpu", "", Settings((), 1), [Record("run", {}, config, {})], Summary("m", "undecided")
    )
    assert reuse([tmp_path], "tried", "cpu", [job], tmp_path / "out") == 1
    with pytest.raises(UserError, match="run is of another experiment: what was measured of it is not recorded"):
        reuse([tmp_path], "another", "tried.cpu", [job], tmp_path / "other")


def test_the_first_home_counts(tmp_path):
    for home, value in (("own", 1.0), ("other", 2.0)):
        for name in ("a", "b") if home == "other" else ("a",):
            write_unfinished(
                tmp_path / home, "x", "cpu", "", Settings((), 1), [Record(name, {}, {}, {"loss": value})], []
            )
    found = recorded([tmp_path / "own", tmp_path / "other"], "x", "cpu")
    assert {name: record.metrics["loss"] for name, record in found.items()} == {"a": 1.0, "b": 2.0}


@dataclasses.dataclass(frozen=True)
class Rate:
    """A trial that is better the higher its rate."""

    arm: str
    factor: float

    @property
    def name(self):
        return f"{self.arm}-x{self.factor:g}"

    @property
    def labels(self):
        return {"arm": self.arm, "factor": self.factor}

    def config(self):
        return {"factor": self.factor}

    def run(self, folder: Path) -> dict:
        return {"loss": -self.factor}


def test_rates_beyond_the_first_grid_are_kept_before_their_tuning_is_finished(tmp_path):
    of = functools.partial(Rate, "arm")
    tuning = Tuning("rate", {"arm": "arm"}, of, (1.0, 2.0), 8)
    plan, folder = [of(1.0), of(2.0), tuning], tmp_path / "folder"
    work([of(1.0), of(2.0), of(4.0)], folder)  # what a tuning that was ended leaves
    write_unfinished(tmp_path, "tried", "cpu", "", Settings((), 1), done(plan, folder), [])
    again = tmp_path / "again"
    assert reuse([tmp_path], "tried", "cpu", plan, again) == 2 and finished(of(4.0), again) is not None
    work(plan, again)
    assert [record.name for record in done(plan, again)] == ["arm-x1", "arm-x2", "rate"]  # whose record has the rest


def test_a_smaller_plan_does_not_replace_a_larger_result(tmp_path, capsys):
    jobs = [Count("a"), Count("b")]
    work(jobs, tmp_path / "jobs")
    _written(tmp_path, jobs)
    check_kept(tmp_path, "tried", "cpu", [*jobs, Count("c")])
    check_kept(tmp_path, "another", "cpu", [])
    with pytest.raises(UserError, match="its b is of another experiment: value was 1 and is now 2"):
        check_kept(tmp_path, "tried", "cpu", [Count("a"), Count("b", 2)])
    with pytest.raises(UserError, match=r"holds runs that this plan lacks, b; give another --results"):
        check_kept(tmp_path, "tried", "cpu", jobs[:1])
    with pytest.raises(SystemExit):
        command.main("nag_start.py", ["--seeds", "1", "--out", str(tmp_path / "out")])
    assert "nag_start.cpu.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"runs": ["x"], "config": {}, "origin": {}}',
        '{"runs": [{"name": "b", "like": "a", "config": {}}], "config": {}}',
    ],
)
def test_a_damaged_result_is_named(text, tmp_path):
    path = tmp_path / "tried.json"
    path.write_text(text)
    with pytest.raises(UserError, match="results = .*tried.json.*cannot be read"):
        read_result(path)


def test_a_damaged_file_is_named_before_anything_is_run(tmp_path):
    path = unfinished_file(tmp_path, "tried", "cpu")
    path.parent.mkdir()
    path.write_text("<<<<<<< ours")
    with pytest.raises(UserError, match="unfinished/tried.cpu.json': cannot be read .*bring it back, or delete it"):
        check_kept(tmp_path, "tried", "cpu", [])


def test_trials_of_an_arm_that_a_result_lacks_stay(tmp_path):
    arms = {arm: Tuning(arm, {"arm": arm}, functools.partial(Rate, arm), (1.0, 2.0), 8) for arm in ("one", "other")}
    trials = {arm: [Rate(arm, factor) for factor in (1.0, 2.0)] for arm in arms}
    work([*trials["one"], *trials["other"], arms["one"]], tmp_path / "jobs")
    part = _written(tmp_path, [*trials["one"], *trials["other"]], write_unfinished)
    _written(tmp_path, [*trials["one"], arms["one"]])
    assert {record.name for record in read_result(part)["records"]} >= {"other-x1", "other-x2"}
    work([arms["other"]], tmp_path / "jobs")
    _written(tmp_path, [arms["one"], arms["other"]])
    assert not part.exists()


def test_what_was_computed_again_is_still_told_of_runs_that_are_reused(tmp_path):
    jobs = [Count("a"), Count("b")]
    work(jobs, tmp_path / "jobs")
    path = _written(tmp_path, jobs[:1])
    path.write_text(path.read_text().replace('"size":', '"computed_again": {"commit": "abc", "what": "it"},\n "size":'))
    assert reuse([tmp_path], "tried", "cpu", jobs, tmp_path / "out") == 1
    work(jobs, tmp_path / "out")
    write_result(
        tmp_path, "more", "cpu", "", Settings((), 1), collect(jobs, tmp_path / "out"), Summary("", "undecided")
    )
    told = [
        record.origin.get("computed_again") for record in read_result(tmp_path / "results/more.cpu.json")["records"]
    ]
    assert told == [{"commit": "abc", "what": "it"}, None]


def test_a_run_that_another_function_measured_is_another_experiment():
    config = RunConfig(find_scheme("nag")(), ModelConfig(depth=2, width=16))
    job = Training("run", {}, config, done)
    known = json.loads(json.dumps(job.config()))
    assert changed(known, job) == "" and "after.of was" in changed(known, Training("run", {}, config, reuse))
    assert (
        changed({name: own for name, own in known.items() if name != "after"}, job) == ""
    )  # written before it was told


@dataclasses.dataclass(frozen=True)
class Measure:
    """Without options."""

    def __call__(self, folder: Path) -> dict:
        return {}


def test_whatever_may_be_called_measures_a_run():
    for after in (Measure(), functools.partial(done, [])):
        config = Training("run", {}, RunConfig(find_scheme("nag")(), ModelConfig(depth=2, width=16)), after).config()
        assert config["after"]["of"] in ("tests.experiments.test_reuse.Measure", "functools.partial")


def test_a_smoke_run_is_kept_in_its_own_folder(tmp_path):
    jobs = planned(load("inverse_depth_fit"), load("inverse_depth_fit").settings("smoke"))
    work(jobs[:1], tmp_path)
    command.main("inverse_depth_fit.py", ["--size", "smoke", "--out", str(tmp_path), "--keep"])
    assert unfinished_file(tmp_path, "inverse_depth_fit", "smoke").exists()
