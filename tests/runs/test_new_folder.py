"""A new folder appears only when it is complete, and a failed attempt does not block another."""

import subprocess
import sys

import pytest

from nagjax.errors import UserError
from nagjax.runs.new_folder import new_folder


def test_it_appears_whole(tmp_path):
    out = tmp_path / "deep" / "out"
    with new_folder(out, "export") as building:
        (building / "a").write_text("1")
        assert not out.exists()
    assert [path.name for path in out.iterdir()] == ["a"] and list(out.parent.iterdir()) == [out]


def test_an_empty_folder_is_taken_also_by_a_link(tmp_path):
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to(tmp_path / "disk")
    with new_folder(tmp_path / "out", "export") as building:
        (building / "a").write_text("1")
    assert (tmp_path / "disk" / "a").read_text() == "1" and (tmp_path / "out").is_symlink()


@pytest.mark.parametrize(
    "error", [OSError(28, "No space left on device"), UserError("x", 1, "no"), KeyboardInterrupt()]
)
def test_a_failure_leaves_nothing(tmp_path, error):
    with pytest.raises(type(error)), new_folder(tmp_path / "out", "export") as building:
        (building / "deep").mkdir()
        (building / "deep" / "a").write_text("1")
        raise error
    assert list(tmp_path.iterdir()) == []


KILLED = """
import os, sys
from nagjax.runs.new_folder import new_folder
with new_folder(sys.argv[1], "import") as building:
    (building / "half").write_text("1")
    os.kill(os.getpid(), 9)
"""


def test_a_kill_is_in_nobodys_way(tmp_path):
    assert subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "out")]).returncode == -9
    assert (tmp_path / ".out.partial" / "half").exists()
    assert not (tmp_path / "out").exists()
    with new_folder(tmp_path / "out", "import") as building:
        (building / "whole").write_text("2")
        with pytest.raises(UserError, match="is being written by process"), new_folder(tmp_path / "out", "import"):
            pass
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["whole"] and len(list(tmp_path.iterdir())) == 1


def test_what_is_in_use_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "a").write_text("1")
    (tmp_path / "lost").symlink_to(tmp_path / "nowhere")
    for name in ("file", "full", "lost"):
        with pytest.raises(UserError, match="out = "), new_folder(tmp_path / name, "prune"):
            pass
    with pytest.raises(UserError, match="is not empty"), new_folder(tmp_path / "out", "prune"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "b").write_text("somebody was faster")
    assert (tmp_path / "out" / "b").exists() and not (tmp_path / ".out.partial").exists()
