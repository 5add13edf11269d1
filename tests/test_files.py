"""What is written is whole or not there, however many write it at once and whenever one of them is killed."""

import os
import signal
import subprocess
import sys
import uuid

import pytest

from nagjax import files
from nagjax.errors import UserError
from nagjax.files import check_writable, check_writable_file, json_text, read_json, write_bytes, write_json, write_text
from nagjax.json_reader import parse_json

WRITES = {
    "bytes": lambda path, value: write_bytes(path, value.encode()),
    "text": write_text,
    "json": write_json,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("moment", ["create", "fsync", "replace"])
def test_two_writers_of_one_file_both_succeed(tmp_path, monkeypatch, moment, write):
    """The second one writes all it has while the first is about to do one thing."""
    path, place = tmp_path / "sweep.json", files if moment == "create" else os
    own = getattr(place, moment)

    def interrupted(*arguments):
        monkeypatch.setattr(place, moment, own)
        write(path, "second")
        return own(*arguments)

    monkeypatch.setattr(place, moment, interrupted)
    write(path, "first")
    assert path.read_text().strip('"') == "first"
    assert [found.name for found in tmp_path.iterdir()] == ["sweep.json"]


def test_what_a_killed_writer_leaves_is_in_nobody_s_way(tmp_path):
    path = tmp_path / "sweep.json"
    write_text(path, "whole")
    dying = "import os, sys; os.replace = lambda *_: os.kill(os.getpid(), 9)"
    code = f"{dying}; from nagjax.files import write_text; write_text(*sys.argv[1:])"
    killed = subprocess.run([sys.executable, "-c", code, str(path), "half"])
    assert killed.returncode == -signal.SIGKILL and path.read_text() == "whole"
    (left,) = set(tmp_path.iterdir()) - {path}
    assert left.name.startswith("sweep.json.") and left.name.endswith(files.PARTIAL)
    write_text(path, "new")
    assert path.read_text() == "new"


def test_json_has_no_number_that_is_not_finite(tmp_path):
    value = {"a": float("nan"), "b": [1.5, -float("inf"), {"c": (2, float("inf"))}], "d": None, "e": "NaN", "f": True}
    want = {"a": None, "b": [1.5, None, {"c": [2, None]}], "d": None, "e": "NaN", "f": True}
    assert parse_json(json_text(value)) == want
    write_json(tmp_path / "found.json", value)
    assert read_json(tmp_path / "found.json") == want


def test_a_place_for_a_file_is_one_where_it_can_be_written(tmp_path):
    check_writable_file(tmp_path / "new" / "a.json")
    assert not list((tmp_path / "new").iterdir())
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path, tmp_path / "link", "/dev/null/a.json"):
        with pytest.raises(UserError):
            check_writable_file(path, "json")


@pytest.mark.parametrize("url", ["gs://bucket/runs/a", "s3://bucket", "https://example.org/a"])
def test_a_url_is_no_folder(url, tmp_path, monkeypatch):
    """As a path it is a folder `gs:` right here."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="mount the bucket"):
        check_writable(url)
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_nothing(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="sweep.json"):
        write_text(tmp_path / "sweep.json", "new")
    assert not list(tmp_path.iterdir())


def test_no_link_in_the_scratch_file_s_place_is_followed(tmp_path, monkeypatch):
    drawn = uuid.uuid4()
    monkeypatch.setattr(uuid, "uuid4", lambda: drawn)
    (tmp_path / "secret").write_text("the secret")
    (tmp_path / f"a.{os.getpid()}-{drawn.hex}{files.PARTIAL}").symlink_to(tmp_path / "secret")
    with pytest.raises(FileExistsError):
        write_text(tmp_path / "a", "new")
    assert (tmp_path / "secret").read_text() == "the secret" and not (tmp_path / "a").exists()
