"""Checkpoints: complete or absent, kept by policy, and never used after a failed save or damage."""

import errno
import os
import shutil
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.errors import UserError
from nagjax.runs.config import TrainConfig
from nagjax.runs.names import MANIFEST
from nagjax.train.checkpoint import store as checkpoint
from nagjax.train.checkpoint.manifest import Damaged, verify, write_facts, write_manifest
from nagjax.train.checkpoint.retention import SaveClock, Saved, kept
from nagjax.train.checkpoint.store import Checkpoints, steps_aside, steps_saved
from nagjax.train.safety.guard import new_guard
from nagjax.train.state import TrainState


def state_at(step: int) -> TrainState:
    params = {"w": jnp.arange(64, dtype=jnp.float32) + step}
    return TrainState(jnp.int32(step), params, (), jnp.zeros(2, jnp.uint32), {}, new_guard())


ABSTRACT = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state_at(0))


def saved_at(folder, *steps, **policy):
    with Checkpoints(folder, **policy) as checkpoints:
        for step in steps:
            checkpoints.save(step, state_at(step))
    return folder


def test_what_is_kept():
    scores = {1: 3.0, 2: None, 3: 1.0, 4: 1.0, 5: 2.0, 6: None, 7: 9.0}
    saved = [Saved(step, score) for step, score in scores.items()]
    assert kept(saved, latest=2) == {6, 7}
    assert kept(saved, latest=1, best=2) == {3, 4, 7}
    assert kept(saved, latest=1, best=1) == {3, 7}
    assert kept(saved, latest=1, every=3) == {3, 6, 7}
    assert kept(saved, latest=9) == set(scores)
    assert kept([Saved(0, float("nan")), *saved], latest=1, best=1) == {3, 7}


def test_when_to_save():
    now = types.SimpleNamespace(seconds=0.0)
    clock = SaveClock(TrainConfig(steps=100, save_every=10, save_minutes=2.0, keep_best=1), now=lambda: now.seconds)
    due = lambda step, score=None, saved=(): clock.due(step, score, saved, clock.overdue())  # noqa: E731
    assert due(10) and due(100) and not due(11)
    now.seconds = 120.0
    assert due(11)
    clock.restart()
    assert not due(12)
    assert due(13, 0.5) and due(13, 0.5, [Saved(10, 0.6)])
    assert not due(13, 0.7, [Saved(10, 0.6)]) and not due(13, None, [Saved(10, 0.6)])
    assert not due(13, float("nan")) and due(13, 0.5, [Saved(10, float("nan"))])
    plain = SaveClock(TrainConfig(steps=100, save_every=10))
    assert not plain.due(13, 0.5, [], plain.overdue())


def test_policies_on_disk_and_after_reopening(tmp_path):
    scores = {2: 0.5, 4: 0.2, 6: 0.4, 8: 0.3, 10: 0.6}
    policy = dict(latest=1, best=1, every=3)
    for step, score in scores.items():  # opened anew each time: the scores are read back
        with Checkpoints(tmp_path, **policy) as checkpoints:
            checkpoints.save(step, state_at(step), {"score": score})
    assert steps_saved(tmp_path) == [4, 6, 10]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.facts(4) == {"score": 0.2} and checkpoints.newest() == checkpoints.latest == 10
        got = checkpoints.restore(ABSTRACT, 6)
        jax.tree.map(np.testing.assert_array_equal, got, state_at(6))


@pytest.mark.parametrize(
    "wanted, said",
    [({"w": (32, 2)}, r"w is \[64\] in it and \[32, 2\] here"), ({"w": (64,), "b": {"c": ()}}, "b/c is not in it")],
)
def test_a_parameter_that_is_another_one_is_named(tmp_path, wanted, said):
    """As where the code of a scheme has changed."""
    kind = lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=ABSTRACT.params["w"].sharding)  # noqa: E731
    params = jax.tree.map(kind, wanted, is_leaf=lambda x: isinstance(x, tuple))
    with Checkpoints(saved_at(tmp_path, 2)) as checkpoints:
        with pytest.raises(UserError, match=f"{said}.*or the code of its scheme has changed"):
            checkpoints.restore(ABSTRACT._replace(params=params), 2)


def test_what_a_killed_process_left_is_removed_and_never_read(tmp_path):
    saved_at(tmp_path, 2, 4)
    for name in ("6.saving", "6.saving.0a1b.orbax-checkpoint-tmp", "2.deleting", "1.damaged.deleting"):
        shutil.copytree(tmp_path / "4", tmp_path / name)
    for name in ("notes", "2030.01"):
        (tmp_path / name).mkdir()
    assert steps_saved(tmp_path) == [2, 4]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.newest() == 4
    assert sorted(path.name for path in tmp_path.iterdir()) == ["2", "2030.01", "4", "notes"]


def test_a_save_that_another_process_has_removed_is_not_made_of_what_that_one_writes(tmp_path, monkeypatch):
    """A process was suspended between a checkpoint and its manifest, and another has taken the folder."""

    def late(scratch, *given):
        monkeypatch.undo()
        Checkpoints(tmp_path)
        other = tmp_path / scratch.name.replace(scratch.suffix, ".another")
        other.mkdir()
        (other / "half").touch()
        write_manifest(scratch, *given)

    monkeypatch.setattr(checkpoint, "write_manifest", late)
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state_at(2))
        with pytest.raises(UserError, match="could not be written"):
            checkpoints.wait()
    assert [path.name for path in tmp_path.iterdir()] == ["2.saving.another"] and steps_saved(tmp_path) == []


def test_a_process_that_has_lost_the_folder_names_and_removes_no_checkpoint(tmp_path):
    def lost():
        raise UserError("out", str(tmp_path), "was taken over")

    saved_at(tmp_path, 2)
    with Checkpoints(tmp_path, latest=1, check=lost) as checkpoints:
        checkpoints.save(4, state_at(4))
        with pytest.raises(UserError, match="was taken over"):
            checkpoints.wait()
    assert steps_saved(tmp_path) == [2]


def damages(folder):
    """Every file of a checkpoint, cut, changed in one bit, and removed, one at a time."""
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            content = path.read_bytes()
            flipped = bytes([content[0] ^ 1]) + content[1:] if content else b"x"
            for what, damaged in (("cut", content[:-1] if content else None), ("flipped", flipped), ("lost", None)):
                path.unlink()
                if damaged is not None:
                    path.write_bytes(damaged)
                yield path, what
                path.write_bytes(content)


def test_every_damage_to_every_file_is_named(tmp_path):
    saved_at(tmp_path, 4)
    seen = 0
    for path, what in damages(tmp_path / "4"):
        with pytest.raises(Damaged, match=path.name.replace(".", r"\.")):
            verify(tmp_path / "4")
        with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match="--resume=previous") as caught:
            checkpoints.newest()
        assert caught.value.value == str(tmp_path / "4"), what
        seen += 1
    assert seen >= 15
    verify(tmp_path / "4")


def test_previous_skips_the_damaged_ones_and_puts_them_aside(tmp_path, capsys):
    saved_at(tmp_path, 2, 4, 6, latest=3)
    for step in (4, 6):
        (tmp_path / str(step) / MANIFEST).unlink()
    with Checkpoints(tmp_path, latest=3) as checkpoints:
        assert checkpoints.newest(skip_damaged=True) == checkpoints.latest == 2
        said = capsys.readouterr().err
        assert f"{tmp_path / '6'} is damaged and skipped: {MANIFEST} is missing" in said and str(tmp_path / "4") in said
        checkpoints.save(4, state_at(4))
    (tmp_path / "².damaged").mkdir()
    assert steps_saved(tmp_path) == [2, 4] and steps_aside(tmp_path) == [4, 6]
    with Checkpoints(tmp_path) as checkpoints:
        assert checkpoints.newest() == 4


def test_when_nothing_intact_is_left_the_run_does_not_silently_start_over(tmp_path):
    saved_at(tmp_path, 2)
    (tmp_path / "2" / MANIFEST).write_text("{")
    for skip in (True, False):  # the second time there is no numbered folder any more
        with Checkpoints(tmp_path) as checkpoints, pytest.raises(UserError, match="no intact checkpoint.*--fresh"):
            checkpoints.newest(skip_damaged=skip)


def test_a_failed_save_raises_at_the_next_step_and_is_not_remembered(tmp_path, monkeypatch):
    saved_at(tmp_path, 2)

    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with Checkpoints(tmp_path) as checkpoints:
        monkeypatch.setattr(checkpoint, "write_manifest", failing)
        checkpoints.save(4, state_at(4))
        checkpoints._pending[1].exception()  # it has failed in the background
        assert checkpoints.failed
        with pytest.raises(UserError, match="Input/output error"):
            checkpoints.wait()
        assert not checkpoints.failed  # once is enough
        assert checkpoints.latest == 2 and [s.step for s in checkpoints.saved] == [2]
        monkeypatch.undo()
        checkpoints.save(4, state_at(4))
    assert steps_saved(tmp_path) == [2, 4]


def test_no_room_is_an_error_before_anything_is_touched(tmp_path, monkeypatch):
    saved_at(tmp_path, 2, latest=1)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with Checkpoints(tmp_path, latest=1) as checkpoints:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: types.SimpleNamespace(free=1000))
        with pytest.raises(UserError, match="1,000 are free"):
            checkpoints.save(4, state_at(4))
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_the_old_one_stays_until_the_new_one_is_whole(tmp_path, monkeypatch):
    saved_at(tmp_path, 2, latest=1)
    there = []

    def watching(folder, *what):
        there.append(steps_saved(tmp_path))
        write_manifest(folder, *what)
        there.append(steps_saved(tmp_path))

    monkeypatch.setattr(checkpoint, "write_manifest", watching)
    saved_at(tmp_path, 4, latest=1)
    assert there == [[2], [2]] and steps_saved(tmp_path) == [4]


@pytest.mark.parametrize("what", ["rename", "rmtree"])
def test_an_old_one_that_cannot_be_removed_does_not_fail_the_new_one(tmp_path, monkeypatch, capsys, what):
    """NFS keeps files of a folder as long as somebody reads them."""

    def busy(path, *_, onexc=None, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

    rename, remove = type(tmp_path).rename, checkpoint.shutil.rmtree
    if what == "rename":
        fails = lambda path, to: busy(path) if path.name == "1" else rename(path, to)  # noqa: E731
        monkeypatch.setattr(type(tmp_path), "rename", fails)
    else:
        monkeypatch.setattr(checkpoint.shutil, "rmtree", busy)
    saved_at(tmp_path, 1, 2, latest=1)
    assert 2 in steps_saved(tmp_path) and verify(tmp_path / "2") == {}
    assert ("could not be removed" in capsys.readouterr().err) == (what == "rename")
    monkeypatch.setattr(type(tmp_path), "rename", rename)
    monkeypatch.setattr(checkpoint.shutil, "rmtree", remove)
    saved_at(tmp_path, 3, latest=1)
    assert steps_saved(tmp_path) == [3] and [path.name for path in tmp_path.iterdir()] == ["3"]


def test_facts_can_be_corrected_and_are_sealed_too(tmp_path):
    with Checkpoints(tmp_path) as checkpoints:
        checkpoints.save(2, state_at(2), {"score": None, "evaluated": False})
        checkpoints.wait()
        checkpoints.save(2, state_at(2), {"score": 1.5, "evaluated": True})
        assert checkpoints.saved == [Saved(2, 1.5)] and verify(tmp_path / "2") == {"score": 1.5, "evaluated": True}
    write_facts(tmp_path / "2", {"score": 0.5})
    text = (tmp_path / "2" / MANIFEST).read_text()
    (tmp_path / "2" / MANIFEST).write_text(text.replace("0.5", "0.4"))
    with pytest.raises(Damaged, match=MANIFEST):
        verify(tmp_path / "2")
