"""Each job is done once, by any free worker, and a record belongs to one experiment only."""

import dataclasses
import fcntl
from pathlib import Path

import pytest

from experiments.harness import command
from experiments.harness.jobs import finished
from experiments.harness.recipe import load
from experiments.harness.results import Summary, read_result, result_file, write_result
from experiments.harness.sweep import Shard, collect, settings_from, work, work_in_processes
from nagjax.errors import UserError


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
    work(Shard.parse("1/2").take(jobs), tmp_path)
    assert [_times(tmp_path, job) for job in jobs] == [0, 1, 0, 1, 0] and collect(jobs, tmp_path) is None
    work(jobs, tmp_path)
    work(jobs, tmp_path)
    assert [_times(tmp_path, job) for job in jobs] == [1] * 5
    assert [record.metrics["loss"] for record in collect(jobs, tmp_path)] == [0, 1, 2, 3, 4]


def test_a_job_held_by_another_process_is_left_to_it(tmp_path):
    jobs = [Count("held"), Count("free")]
    (tmp_path / "held").mkdir()
    with (tmp_path / "held" / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        work(jobs, tmp_path)
        assert [_times(tmp_path, job) for job in jobs] == [0, 1]
    work(jobs, tmp_path)
    assert _times(tmp_path, jobs[0]) == 1


def test_a_record_of_another_config_is_refused(tmp_path):
    work([Count("job", 1)], tmp_path)
    with pytest.raises(UserError, match="value was 1 and is now 2"):
        finished(Count("job", 2), tmp_path)


@pytest.mark.parametrize("text", ["2/2", "-1/2", "1", "a/b", "0/0"])
def test_bad_shards(text):
    with pytest.raises(UserError, match="shard"):
        Shard.parse(text)


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


def test_a_worker_that_fails_says_why(tmp_path):
    recipe = load("inverse_depth_fit")
    settings = dataclasses.replace(recipe.settings("smoke"), csv="missing.csv")
    with pytest.raises(UserError, match=r"a process failed \(csv = 'missing.csv': give a table"):
        work_in_processes(recipe, settings, tmp_path, 1)
