"""The commit that a result names is that of all code that made it."""

import subprocess

import pytest

from pallas_kernels import origin


@pytest.mark.parametrize(
    "path, changed",
    [
        ("benchmarks/device.py", True),
        ("benchmarks/parts/values.py", True),
        ("nagjax/cli.py", True),
        ("benchmarks/results/plan.json", False),
        ("docs/cpu.md", False),
    ],
)
def test_a_changed_program_makes_the_commit_dirty(path, changed, tmp_path, monkeypatch):
    def git(*arguments):
        who = ("-c", "user.name=n", "-c", "user.email=e@localhost", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    file = tmp_path / path
    for each in (file, tmp_path / "pallas_kernels" / "origin.py"):
        each.parent.mkdir(parents=True, exist_ok=True)
        each.write_text("before")
    git("init")
    git("add", ".")
    git("commit", "-m", "all")
    monkeypatch.delenv("NAGJAX_COMMIT", raising=False)
    monkeypatch.setattr(origin, "__file__", str(tmp_path / "pallas_kernels" / "origin.py"))
    assert not origin.commit.__wrapped__().endswith("-dirty")
    file.write_text("after")
    assert origin.commit.__wrapped__().endswith("-dirty") == changed


def test_a_copy_without_history_notices_that_it_was_changed(tmp_path, monkeypatch):
    file = tmp_path / "benchmarks" / "parts" / "values.py"
    file.parent.mkdir(parents=True)
    file.write_text("before")
    monkeypatch.setattr(origin, "__file__", str(tmp_path / "pallas_kernels" / "origin.py"))
    for told in ("abc", "abc-dirty", f"abc+{origin.sources()}"):
        monkeypatch.setenv("NAGJAX_COMMIT", told)
        assert origin.commit.__wrapped__() == told.split("+")[0]
    (file.parent / "notes.md").write_text("no program")
    assert origin.commit.__wrapped__() == "abc"
    file.write_text("after")
    assert origin.commit.__wrapped__() == "abc-dirty"
    monkeypatch.setenv("NAGJAX_COMMIT", "abc-dirty+000")
    assert origin.commit.__wrapped__() == "abc-dirty"
