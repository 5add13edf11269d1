"""A run folder that somebody else made: no link in it is written through, and none is read that leads out of it."""

import contextlib
import dataclasses
import os
import shutil

import numpy as np
import pytest

from nagjax.cli import main
from nagjax.errors import UserError
from nagjax.files import inside, read_bytes, write_bytes, write_text
from nagjax.report.maps import write_map
from nagjax.runs import names
from nagjax.runs.config import MeshConfig
from nagjax.runs.folder import clear, read_config
from nagjax.runs.log import load_run
from nagjax.runs.metrics import JsonLines
from nagjax.runs.opening import open_run, read_calibration, read_origin
from nagjax.train.loop import train

SECRET = "the secret"


@pytest.fixture
def secret(tmp_path):
    path = tmp_path / "secret"
    path.write_text(SECRET)
    return path


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


WRITES = {
    names.CONFIG: lambda path: write_text(path, "{}"),
    names.METRICS: lambda path: JsonLines(path, 0),
    names.MAP: lambda path: write_map(PATHS, path.parent, "title"),
    names.DIAGNOSIS_DATA: lambda path: write_bytes(path, b"1"),
}
PATHS = {"given": 1, "tokens": ["a"], "ran": np.ones((2, 1), bool), "degrees": np.ones((2, 1))}


@pytest.mark.parametrize("name", WRITES)
def test_nothing_is_written_through_a_link(folder, secret, name):
    (folder / name).symlink_to(secret)
    with pytest.raises(UserError, match=f"{name}.*is a link"):
        WRITES[name](folder / name)
    assert secret.read_text() == SECRET and (folder / name).is_symlink()


@pytest.mark.parametrize("name", WRITES)
def test_nor_through_one_in_the_place_of_what_is_being_written(folder, secret, name, monkeypatch):
    monkeypatch.setattr("nagjax.files.partial_name", lambda own: f"{own}.partial")
    (folder / f"{name}.partial").symlink_to(secret)
    with contextlib.suppress(OSError, UserError):
        WRITES[name](folder / name)
    assert secret.read_text() == SECRET and not (folder / name).is_symlink()


READS = {
    names.CONFIG: read_config,
    names.CALIBRATION: read_calibration,
    names.ORIGIN: read_origin,
}


@pytest.mark.parametrize("name", READS)
@pytest.mark.parametrize("where", ["out", "nowhere", "circle"])
def test_no_link_out_is_read(folder, secret, name, where):
    secret.write_text("{}")
    (folder / name).symlink_to({"out": secret, "nowhere": folder / "lost", "circle": folder / name}[where])
    with pytest.raises(UserError, match=f"{name}.*is a link"):
        READS[name](folder)


@pytest.mark.parametrize("name", [names.SAMPLE, names.METRICS, names.INFO])
def test_a_comparison_publishes_nothing(make_run, secret, name):
    from tests.run_folders import eval_line, train_line

    run = make_run("run", [train_line(1, 2.0), eval_line(1, 2.0)])
    load_run(run)
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(secret)
    with pytest.raises(UserError, match=f"{name}.*is a link out of"):
        load_run(run)


def test_a_link_inside_the_folder_and_one_to_the_folder_are_fine(folder, tmp_path):
    (folder / "a").write_text("1")
    (folder / "b").symlink_to("a")
    (tmp_path / "link").symlink_to(folder)
    assert read_bytes(tmp_path / "link" / "b") == b"1"
    write_text(tmp_path / "link" / "c", "2")
    assert (folder / "c").read_text() == "2"


def test_the_cache_of_a_hub_is_such_a_folder(tmp_path):
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / "1", tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (blobs / "ff").write_text("1")
    (snapshot / "config.json").symlink_to("../../blobs/ff")
    assert read_bytes(snapshot / "config.json") == b"1"
    (tmp_path / "secret").write_text("2")
    (snapshot / "other").symlink_to("../../../secret")
    (blobs / "ee").symlink_to(tmp_path / "secret")
    (snapshot / "twice").symlink_to("../../blobs/ee")
    for name in ("other", "twice"):
        with pytest.raises(UserError, match="is a link out of"):
            read_bytes(snapshot / name)


def test_a_pipe_is_not_waited_for(folder):
    os.mkfifo(folder / names.CONFIG)
    with pytest.raises(UserError, match="neither a file nor a folder"):
        read_config(folder)


@pytest.mark.parametrize("target", ["elsewhere", "nowhere"])
def test_a_checkpoint_is_no_link(run_folder, tmp_path, target):
    """A dangling one made `nagjax generate` hang."""
    run = tmp_path / "copy"
    (run / names.CHECKPOINTS).mkdir(parents=True)
    (run / names.CONFIG).write_bytes((run_folder / names.CONFIG).read_bytes())
    step = run / names.CHECKPOINTS / "30"
    step.symlink_to(run_folder / names.CHECKPOINTS / "30" if target == "elsewhere" else tmp_path / "lost")
    with pytest.raises(UserError, match="30.*is a link"):
        open_run(run)


def test_checkpoints_may_lie_on_another_disk(run_folder, tmp_path):
    run = tmp_path / "copy"
    run.mkdir()
    (run / names.CONFIG).write_bytes((run_folder / names.CONFIG).read_bytes())
    (run / names.CHECKPOINTS).symlink_to(run_folder / names.CHECKPOINTS)
    assert open_run(run).step == 30


def test_a_disk_that_is_not_there_is_no_new_run(run_folder, tmp_path):
    """Training would begin anew, with the run's log and id deleted."""
    run = shutil.copytree(run_folder, tmp_path / "copy", symlinks=True)
    shutil.rmtree(run / names.CHECKPOINTS)
    (run / names.CHECKPOINTS).symlink_to(tmp_path / "disk" / "checkpoints")
    before = {path: path.read_bytes() for path in run.iterdir() if path.is_file()}
    config = dataclasses.replace(read_config(run), mesh=MeshConfig(data=1))
    for fresh in (False, True):
        with pytest.raises(UserError, match="is a link that leads nowhere: mount the disk"):
            train(config, run, fresh=fresh)
    assert {path: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


# ---- --fresh


@pytest.fixture
def full(folder):
    """A run's folder with all that a run writes, and two files that it does not."""
    for name in names.FILES:
        (folder / name).write_text(name)
    for step in ("10", "20", "30.saving", "30.saving.0a1b", "5.damaged", "6.damaged.deleting"):
        (folder / names.CHECKPOINTS / step / "state").mkdir(parents=True)
    for name in names.FOLDERS:
        (folder / name).mkdir()
    (folder / "notes.md").write_text("mine")
    (folder / names.CHECKPOINTS / "readme").write_text("mine")
    return folder


def content(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def test_fresh_deletes_what_a_run_writes_and_says_so(full, capsys):
    clear(full)
    assert content(full) == ["checkpoints", "checkpoints/readme", "notes.md"]
    said = capsys.readouterr().err
    assert f"--fresh deletes in {full}: checkpoints/10, checkpoints/20" in said
    assert all(name in said for name in names.FILES) and "notes.md" not in said
    clear(full)
    assert capsys.readouterr().err == ""


def test_fresh_leaves_the_wandb_folder_of_other_programs(full):
    (full / names.WANDB_ID).unlink()
    clear(full)
    assert content(full) == ["checkpoints", "checkpoints/readme", "notes.md", "wandb"]


def test_fresh_empties_checkpoints_on_another_disk(full, tmp_path):
    (full / names.CHECKPOINTS).rename(tmp_path / "disk")
    (full / names.CHECKPOINTS).symlink_to(tmp_path / "disk")
    clear(full)
    assert content(tmp_path / "disk") == ["readme"] and (full / names.CHECKPOINTS).is_symlink()


def test_fresh_removes_links_and_not_what_they_lead_to(full, tmp_path, secret):
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious" / "a").write_text("1")
    (full / names.INFO).unlink()
    (full / names.INFO).symlink_to(secret)
    (full / names.CHECKPOINTS / "40").symlink_to(tmp_path / "precious")
    (full / names.CHECKPOINTS / "10" / "link").symlink_to(tmp_path / "precious")
    clear(full)
    assert secret.read_text() == SECRET and content(tmp_path / "precious") == ["a"]


def test_fresh_fails_before_anything_is_lost(full, monkeypatch):
    before = content(full)
    rename = type(full).rename

    def failing(self, target):
        if self.name == names.METRICS:
            raise PermissionError(1, "Operation not permitted")
        return rename(self, target)

    monkeypatch.setattr(type(full), "rename", failing)
    with pytest.raises(UserError, match=rf"{names.METRICS}.*Operation not permitted.*nothing was deleted"):
        clear(full)
    assert content(full) == before and (full / names.CONFIG).read_text() == names.CONFIG
    monkeypatch.undo()
    monkeypatch.setattr(os, "access", lambda path, mode: "state" not in str(path))
    with pytest.raises(UserError, match="no permission to delete.*nothing was deleted"):
        clear(full)
    assert content(full) == before


def test_what_is_not_there_yet_is_inside(folder):
    assert inside(folder / "new") == (folder / "new").resolve()


def test_json_is_json(folder):
    for text in ("[" * 100_000, "[]", "null", "7", '{"id": 3}'):
        (folder / names.CONFIG).write_text(text)
        with pytest.raises(UserError, match="config.json"):
            read_config(folder)


def test_a_pipe_in_the_place_of_a_file_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for use in (read_bytes, lambda path: write_text(path, "x")):
        with pytest.raises(UserError, match="neither a file nor a folder"):
            use(tmp_path / "pipe")


@pytest.mark.parametrize("name", [names.CONFIG, names.INFO, names.METRICS])
def test_a_folder_in_the_place_of_a_file_is_one_line(tmp_path, capsys, name):
    from tests.run_folders import final_lines, write_run

    runs = [str(write_run(tmp_path / run, final_lines(3.0))) for run in "ab"]
    (tmp_path / "b" / name).unlink()
    (tmp_path / "b" / name).mkdir()
    code = main(["compare", *runs, "--out", str(tmp_path / "out")])
    *_, error = lines = capsys.readouterr().err.splitlines()
    assert code == 2 and len(lines) <= 2 and error.startswith("nagjax: error: ")
