"""Only one writer of a run's folder: between processes, between machines, and after a process or machine died."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nagjax.errors import UserError
from nagjax.runs import lock
from nagjax.runs.lock import WriterLock
from nagjax.runs.names import CONFIG, LOCK

HOLD = """
import sys, time
from nagjax.runs.lock import WriterLock
with WriterLock(sys.argv[1], "train"):
    print("held", flush=True)
    time.sleep(float(sys.argv[2]))
"""


def hold(folder: Path, seconds: float = 60.0) -> subprocess.Popen:
    """Starts a process that holds the folder by the time this returns."""
    process = subprocess.Popen([sys.executable, "-c", HOLD, str(folder), str(seconds)], stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"held\n"
    return process


@pytest.fixture
def holder(tmp_path):
    process = hold(tmp_path)
    yield process
    process.kill()
    process.wait()


def test_a_second_writer_is_told_who_the_first_is(tmp_path, holder):
    with pytest.raises(UserError) as refused, WriterLock(tmp_path, "calibrate", "run"):
        pass
    said = str(refused.value)
    assert said.startswith(f"run = {str(tmp_path)!r}: is being written by process {holder.pid} on ")
    assert "(nagjax train, since 20" in said and f"kill {holder.pid}" in said
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == holder.pid  # untouched


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_dead_process_holds_nothing(tmp_path, holder, number):
    os.kill(holder.pid, number)
    holder.wait()
    assert (tmp_path / LOCK).exists()
    began = time.monotonic()
    with WriterLock(tmp_path, "train"):
        assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    assert time.monotonic() - began < 5 and not (tmp_path / LOCK).exists()


def test_of_many_at_once_one_gets_it(tmp_path):
    script = HOLD.replace("sys.argv[2]", "'0.2'")
    processes = [subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stderr=subprocess.PIPE) for _ in "abc"]
    with WriterLock(tmp_path, "train"):
        codes = [process.wait() for process in processes]
    assert codes == [1, 1, 1]
    assert all(b"is being written by process" in process.stderr.read() for process in processes)


def elsewhere(folder: Path, token: str = "theirs", beat: str = "1") -> None:
    """The lock file of a writer on another machine."""
    holder = {"pid": 7, "host": "far", "boot": "other", "started": "2030-01-01", "doing": "train"}
    content = json.dumps(holder | {"token": token, "beat": beat}).ljust(511) + "\n"
    file = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT)  # in place and at once, as a writer does
    os.pwrite(file, content.encode(), 0)
    os.close(file)


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(lock, "LOOK", 0.01)
    monkeypatch.setattr(lock, "STALE", 0.5)
    monkeypatch.setattr(lock, "BEAT", 0.05)


def test_another_machine_that_stirs_keeps_it(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(lock, "STALE", 60.0)
    elsewhere(tmp_path)
    threading.Timer(0.1, elsewhere, (tmp_path, "theirs", "2")).start()
    with pytest.raises(UserError, match=r"process 7 on far \(nagjax train, since 2030-01-01\).*stop it there"):
        WriterLock(tmp_path, "train").__enter__()


def test_another_machine_that_does_not_loses_it(tmp_path, quick, capsys):
    elsewhere(tmp_path)
    began = time.monotonic()
    with WriterLock(tmp_path, "train"):
        assert 0.3 < time.monotonic() - began < 5
    assert "waiting up to" in capsys.readouterr().err


@pytest.mark.parametrize("shift", [-1e6, 1e6], ids=["long ago", "in the future"])
def test_clocks_may_be_wrong(tmp_path, quick, shift):
    """A lock of long ago is free at once; one from the future is waited for, but not for ever."""
    elsewhere(tmp_path)
    os.utime(tmp_path / LOCK, (time.time() + shift,) * 2)
    began = time.monotonic()
    with WriterLock(tmp_path, "train"):
        assert (time.monotonic() - began > 0.4) == (shift > 0)


def test_another_machine_that_ends_meanwhile(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(lock, "STALE", 60.0)
    elsewhere(tmp_path)
    threading.Timer(0.1, (tmp_path / LOCK).unlink).start()
    with WriterLock(tmp_path, "train"):
        pass


def test_a_writer_that_was_taken_over_stops(tmp_path, quick):
    with WriterLock(tmp_path, "train") as mine:
        mine.check()
        elsewhere(tmp_path)
        mine._thread.join(60)  # it ends when it has seen the other name
        with pytest.raises(UserError, match="was taken over by process 7 on far.* not renewed"):
            mine.check()
        assert mine.lost
    assert json.loads((tmp_path / LOCK).read_text())["token"] == "theirs"


def test_a_process_that_was_suspended_looks_before_its_thread_does(tmp_path, monkeypatch):
    with WriterLock(tmp_path, "train") as mine:
        elsewhere(tmp_path)
        assert not mine.lost  # it was free a moment ago
        now = time.time()
        monkeypatch.setattr(lock.time, "time", lambda: now + 1000.0)
        assert mine.lost


def test_it_is_renewed_in_place(tmp_path, quick):
    with WriterLock(tmp_path, "train") as mine:
        mine.holds("an id")
        assert json.loads((tmp_path / LOCK).read_text())["run"] == "an id"
        before = after = (tmp_path / LOCK).stat()
        while after.st_mtime_ns == before.st_mtime_ns:
            time.sleep(0.01)
            after = (tmp_path / LOCK).stat()
    assert after.st_mtime_ns > before.st_mtime_ns
    assert (after.st_ino, after.st_size) == (before.st_ino, before.st_size) and after.st_size == lock.WIDTH


def test_without_locks_of_the_system_the_file_decides(tmp_path, quick, monkeypatch):
    monkeypatch.setattr(lock, "_flock", lambda file: None)
    monkeypatch.setattr(lock, "STALE", 60.0)
    with WriterLock(tmp_path, "train"):
        with pytest.raises(UserError, match=f"process {os.getpid()} on "):
            WriterLock(tmp_path, "train").__enter__()


def test_without_locks_of_the_system_one_of_two_that_found_it_free_gets_it(tmp_path, quick, monkeypatch):
    """The one who wrote last."""
    monkeypatch.setattr(lock, "_flock", lambda file: None)
    monkeypatch.setattr(lock, "STALE", 60.0)
    monkeypatch.setattr(lock, "LOOK", 0.2)
    threading.Timer(0.1, elsewhere, (tmp_path,)).start()
    threading.Timer(0.5, elsewhere, (tmp_path, "theirs", "2")).start()
    with pytest.raises(UserError, match="process 7 on far"):
        WriterLock(tmp_path, "train").__enter__()
    assert json.loads((tmp_path / LOCK).read_text())["token"] == "theirs"


@pytest.mark.parametrize(
    "content", ["", "{", '{"pid": "7"}', '{"pid": 12, "ho', '{"pid": ' + "[" * 100_000, "\0" * 512]
)
def test_what_a_writer_that_died_has_left_is_no_holder(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    with WriterLock(tmp_path, "train"):
        pass
    assert not (tmp_path / LOCK).exists()


@pytest.mark.parametrize("content", ['{"packages": ["mine"]}', "locked by hand\n", "[]", "null", " ", "[" * 100_000])
def test_a_file_of_something_else_is_left_alone(tmp_path, content):
    (tmp_path / LOCK).write_text(content)
    refused = pytest.raises(UserError, match="lock.json is not nagjax's: choose another folder")
    with refused, WriterLock(tmp_path, "train"):
        pass
    assert (tmp_path / LOCK).read_text() == content


def test_a_link_in_its_place_is_refused(tmp_path):
    (tmp_path / "secret").write_text("mine")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / LOCK).symlink_to(tmp_path / "secret")
    with pytest.raises(UserError, match="is a link"):
        WriterLock(tmp_path / "run", "train").__enter__()
    assert (tmp_path / "secret").read_text() == "mine"


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(UserError, match="it or one of its parents is a file"):
            WriterLock(out, "train").__enter__()


def test_a_corpus_is_prepared_by_one(tmp_path, holder, capsys):
    from nagjax.cli import main

    text = tmp_path / "a.txt"
    text.write_text("some text")
    assert main(["data", "prepare", str(text), "--out", str(tmp_path)]) == 2
    assert f"is being written by process {holder.pid} on " in capsys.readouterr().err
    args = ["data", "prepare", str(text), "--out", str(tmp_path / "corpus"), "--validation", "0.0"]
    assert main(args) == 0 and not (tmp_path / "corpus" / LOCK).exists()
    (tmp_path / "corpus").chmod(0o555)  # a finished corpus is read where it cannot be written
    assert main(args) == 0


def test_a_report_goes_elsewhere_while_a_run_is_written(tmp_path, holder):
    with lock.lock_of_report(tmp_path, "map"):
        pass  # no run's folder
    (tmp_path / CONFIG).write_text("{}")
    with pytest.raises(UserError, match=rf"out = .*process {holder.pid} on .*or choose another folder"):
        lock.lock_of_report(tmp_path, "map").__enter__()
