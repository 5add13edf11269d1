"""Each job is done once, by any free worker, and a record belongs to one experiment only."""

import dataclasses
import errno
import fcntl
import json
import runpy
import subprocess
import sys
import types
from pathlib import Path

import pytest

from experiments.harness import command, sweep
from experiments.harness.jobs import RECORD, Job, Record, Training, finished
from experiments.harness.ngram import Floor
from experiments.harness.puzzles import Solve, Words
from experiments.harness.rates import AtBest, Tuning
from experiments.harness.recipe import load
from experiments.harness.results import Summary, read_result, result_file, write_result
from experiments.harness.searching import Confirmation
from experiments.harness.sweep import collect, settings_from, work, work_in_processes
from experiments.harness.timed import TimeMatched
from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.mod import ModConfig
from nagjax.model.config import ModelConfig
from nagjax.residual import find_scheme
from nagjax.runs import lock
from nagjax.runs.config import RunConfig, flatten
from nagjax.runs.lock import WriterLock
from nagjax.sweep import taken


@dataclasses.dataclass(frozen=True)
class Count:
    """Counts how often it ran."""

    name: str
    value: int = 1

    @property
    def labels(self):
        return {"value": self.value}

    def config(self):
        return {"value": self.value, "pair": (1, 2)}

    def run(self, folder: Path) -> dict:
        with (folder / "ran").open("a") as file:
            file.write("x")
        return {"loss": float(self.value)}


def _times(folder: Path, job: Count) -> int:
    path = folder / job.name / "ran"
    return len(path.read_text()) if path.exists() else 0


def test_shards_share_and_finished_jobs_are_skipped(tmp_path):
    jobs = [Count(f"job{i}", i) for i in range(5)]
    work(jobs[taken("1/2")], tmp_path)
    assert [_times(tmp_path, job) for job in jobs] == [0, 1, 0, 1, 0] and collect(jobs, tmp_path) is None
    work(jobs, tmp_path)
    work(jobs, tmp_path)
    assert [_times(tmp_path, job) for job in jobs] == [1] * 5
    assert [record.metrics["loss"] for record in collect(jobs, tmp_path)] == [0, 1, 2, 3, 4]


def test_a_job_held_by_another_process_is_left_to_it(tmp_path):
    jobs = [Count("held"), Count("free")]
    with WriterLock(tmp_path / "held" / "held", "test"):
        work(jobs, tmp_path)
        assert [_times(tmp_path, job) for job in jobs] == [0, 1]
    work(jobs, tmp_path)
    assert _times(tmp_path, jobs[0]) == 1


def test_a_job_is_held_where_the_file_system_has_no_locks(tmp_path, monkeypatch):
    def refuses(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuses)
    monkeypatch.setattr(lock, "BEAT", 1.5)
    work([Count("job")], tmp_path)
    assert _times(tmp_path, Count("job")) == 1
    with WriterLock(tmp_path / "other" / "held", "test"):
        monkeypatch.setattr(lock, "_boot", lambda: "another machine's")
        work([Count("other")], tmp_path)
    assert not (tmp_path / "other" / "ran").exists()


def test_what_cannot_be_read_is_named(tmp_path):
    work([Count("job")], tmp_path)
    (tmp_path / "job" / "record.json").write_text('{"name": "jo')
    with pytest.raises(UserError, match="record.json': cannot be read .*delete it, and its job is done again"):
        finished(Count("job"), tmp_path)


def test_a_record_of_another_config_is_refused(tmp_path):
    work([Count("job", 1)], tmp_path)
    with pytest.raises(UserError, match="value was 1 and is now 2"):
        finished(Count("job", 2), tmp_path)


def _jobs(mod: ModConfig) -> list[Job]:
    """Of each kind whose config holds a run's."""
    config = RunConfig(find_scheme("plain")(), ModelConfig(mod=mod))
    training = Training("training", {}, config)
    tuning = Tuning("tuning", {}, lambda _: training, (1.0,), 64)
    return [
        training,
        tuning,
        AtBest("best", {}, tuning, lambda _: training),
        Confirmation("searched", {}, (training,), (training,)),
        TimeMatched("timed", {}, config, config),
        Solve("solve", {}, config, Words()),
        Floor(DataConfig(), 16, 2, 3, 1),
    ]


def _without(values, names):
    if not isinstance(values, dict):
        return values
    return {key: _without(own, names) for key, own in values.items() if key not in names}


@pytest.mark.parametrize("job", _jobs(ModConfig()), ids=lambda job: type(job).__name__)
def test_a_record_from_before_an_option_was_there_is_still_of_its_job(job, tmp_path):
    written = {
        "name": job.name,
        "labels": {},
        "config": _without(job.config(), ("lora", "freeze", "rows")),
        "metrics": {},
    }
    assert written["config"] != job.config()
    (tmp_path / job.name).mkdir()
    (tmp_path / job.name / RECORD).write_text(json.dumps(written))
    assert finished(job, tmp_path) is not None


@pytest.mark.parametrize("job", _jobs(ModConfig(rate=(0.25,)))[:-1], ids=lambda job: type(job).__name__)
def test_what_an_old_record_did_otherwise_is_told(job, tmp_path):
    written = {"name": job.name, "labels": {}, "config": _without(job.config(), ("weight",)), "metrics": {}}
    (tmp_path / job.name).mkdir()
    (tmp_path / job.name / RECORD).write_text(json.dumps(written))
    with pytest.raises(UserError, match="mod.weight was 'score'"):
        finished(job, tmp_path)


def test_result_files_come_back_whole(tmp_path):
    jobs = [Count("a", 1), Count("b", 2)]
    work(jobs, tmp_path)
    records = collect(jobs, tmp_path)
    path = write_result(tmp_path, "x", "cpu", "python", jobs[0], records, Summary("one | two", "undecided"))
    found = read_result(path)
    assert [(r.name, r.labels, r.metrics, r.origin) for r in found["records"]] == [
        (r.name, r.labels, r.metrics, r.origin) for r in records
    ]
    assert found["config"] == {"pair": [1, 2]} and [r.config["value"] for r in found["records"]] == [1, 2]


def test_long_configs_are_written_by_their_differences_and_come_back(tmp_path):
    def record(name, **changed):
        return Record(name, {}, {"model": {f"option{i}": i for i in range(40)} | changed}, {"loss": 1.0})

    short = Record("short", {}, {"model": {"option1": 1}}, {"loss": 1.0})
    fewer = Record("fewer", {}, {"model": {f"option{i}": i for i in range(38)}}, {"loss": 1.0})
    other = Record("other", {}, {f"at 1.{i}": [i] for i in range(40)}, {"loss": 1.0})
    records = [record("a"), other, short, record("b", option3="x", more=[1]), fewer]
    path = write_result(tmp_path, "x", "cpu", "python", Count("a", 1), records, Summary("one | two", "undecided"))
    lines = {run["name"]: run for run in json.loads(path.read_text())["runs"]}
    assert [len(lines[name]["config"]) for name in ("a", "other", "short", "b", "fewer")] == [40, 40, 1, 2, 0]
    assert lines["b"]["like"] == lines["fewer"]["like"] == "a" and "like" not in lines["other"]
    assert lines["fewer"]["without"] == ["model.option38", "model.option39"]
    assert [r.config for r in read_result(path)["records"]] == [flatten(r.config) for r in records]


def test_settings_survive_json():
    recipe = load("isoflop_mod")
    settings = recipe.settings("cpu")
    assert settings_from(recipe, dataclasses.asdict(settings)) == settings


def test_processes_and_array_tasks_come_to_the_same_result(tmp_path, capsys):
    def records(folder: Path, *options: str) -> list:
        command.main("inverse_depth_fit.py", ["--size", "smoke", "--out", str(folder), *options])
        return [(r.name, r.metrics) for r in read_result(result_file(folder, "inverse_depth_fit", "smoke"))["records"]]

    with pytest.raises(FileNotFoundError):
        records(tmp_path / "array", "--shard", "0/2")
    assert "not finished" in capsys.readouterr().out
    by_task = records(tmp_path / "array", "--shard", "1/2")
    assert records(tmp_path / "processes", "--processes", "2") == by_task


def test_a_worker_that_fails_says_why(tmp_path, monkeypatch):
    """What it is asked to do is done here, and a shorter process ends as it then would."""
    recipe, asked, started = load("inverse_depth_fit"), [], subprocess.Popen
    settings = dataclasses.replace(recipe.settings("smoke"), csv="missing.csv")

    def worker(command, **options):
        asked.extend(command)
        with monkeypatch.context() as patch, pytest.raises(SystemExit) as ended:
            patch.setattr(sys, "argv", command[2:])
            runpy.run_path(sweep.__file__, run_name="__main__")
        return started(["sh", "-c", 'echo began; echo "$0"; exit 1', ended.value.code], **options)

    monkeypatch.setattr(sweep, "subprocess", types.SimpleNamespace(Popen=worker, STDOUT=subprocess.STDOUT))
    with pytest.raises(UserError, match=r"a process failed \(csv = 'missing.csv': give a table"):
        work_in_processes(recipe, settings, tmp_path, 1)
    assert asked[:3] == [sys.executable, "-m", "experiments.harness.sweep"]
