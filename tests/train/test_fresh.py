"""What can be known before `--fresh` deletes a run is known before."""

import dataclasses
import json
import shutil
import sys
from pathlib import Path

import jax.numpy as jnp
import pytest

import nagjax
from nagjax.data import DataConfig, prepare, store
from nagjax.data.chat_template import find_template
from nagjax.errors import UserError
from nagjax.residual.schemes.plain import Plain
from nagjax.runs import names
from nagjax.runs.config import OptimizerConfig
from nagjax.runs.new_folder import new_folder
from nagjax.train.loop import train
from nagjax.train.warm_start import check_start


@pytest.fixture(scope="module")
def whole(run_of, tmp_path_factory):
    return train(run_of(), tmp_path_factory.mktemp("runs") / "whole")


@pytest.fixture
def other(whole, tmp_path):
    """The run to start from."""
    return shutil.copytree(whole, tmp_path / "other")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != names.LOCK}


def largest(folder):
    return max((path for path in folder.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)


def damaged(other):
    path = largest(other / names.CHECKPOINTS / "6")
    path.write_bytes(path.read_bytes()[:-1])
    return "checkpoints/6.*is damaged"


def of_another_run(other):
    (other / names.IDENTITY).write_text('{"id": "0"}')
    return "checkpoints/6.*is of another run"


def without_checkpoints(other):
    shutil.rmtree(other / names.CHECKPOINTS)
    return "start = .*has no checkpoint yet"


def linked(other):
    (other.parent / "outside").write_text("{}")
    (other / names.TOKENIZER_CONFIG).symlink_to(other.parent / "outside")
    return f"{names.TOKENIZER_CONFIG}.*is a link out of"


def refused(config, run, words):
    before = contents(run)
    with pytest.raises(UserError, match=words):
        train(config, run, fresh=True)
    assert contents(run) == before


@pytest.mark.parametrize(("name", "module"), [("tensorboard", "tensorboardX"), ("wandb", "wandb")])
def test_a_missing_package(whole, run_of, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    refused(run_of(log=(name,)), whole, rf"pip install -e '\.\[{name}\]'")
    train(run_of(log=(name,)), whole)  # is finished, and writes no metrics


@pytest.mark.parametrize("harm", [damaged, of_another_run, without_checkpoints, linked])
def test_a_run_to_start_from_that_cannot_be_read(whole, other, run_of, harm):
    refused(dataclasses.replace(run_of(), start=str(other)), whole, harm(other))


def test_validation_text_that_cannot_be_read(whole, run_of, corpus, tmp_path, monkeypatch):
    moved = shutil.copytree(corpus, tmp_path / "corpus")
    for shard in moved.glob("validation*.tokens"):
        shard.write_bytes(shard.read_bytes().replace(b"o\0", b"\xff\x7f"))
    monkeypatch.setattr(store, "SMALL", 0)
    config = dataclasses.replace(run_of(), data=DataConfig(str(moved)))
    refused(config, whole, "token id = 32767")


@pytest.mark.parametrize(
    "rows, start, ways",
    [
        ("packed", False, "--data.rows whole, a longer --context or more text"),
        ("whole", False, "a longer --context or more text"),
        ("whole", True, "a --start with a longer context or more text"),
    ],
)
def test_validation_text_of_which_nothing_counts(whole, other, run_of, tmp_path, rows, start, ways):
    """Conversations whose answers lie behind the context: the way out is none that was taken already."""
    corpus, paths = tmp_path / "talks", [str(tmp_path / f"{question}.jsonl") for question in ("why? ", "who? ")]
    for path in map(Path, paths):
        said = [{"role": "user", "content": 40 * path.stem}, {"role": "assistant", "content": "so"}]
        path.write_text(8 * (json.dumps({"messages": said}) + "\n"))
    prepare(paths[:1], corpus, held_out=paths[1:], validation=0.0, chat=find_template("bytes", None))
    config = dataclasses.replace(run_of(), data=DataConfig(str(corpus), rows=rows), start=str(other) if start else "")
    refused(config, whole, f"data.path = .*no target in these validation batches counts: train with {ways}$")
    with pytest.raises(UserError, match="no target in these"):
        train(config, tmp_path / "new")
    assert not (tmp_path / "new").exists()


def test_a_folder_in_which_checkpoints_would_be_lost(run_of, tmp_path):
    with pytest.raises(UserError, match="out = .*backslash in its path"):
        train(run_of(), tmp_path / "back\\slash" / "run")
    with pytest.raises(UserError, match="out = .*backslash"), new_folder(tmp_path / "back\\slash", "test"):
        pass
    assert not [*tmp_path.iterdir()]


def test_a_schedule_that_the_steps_are_too_few_for(whole, run_of, tmp_path):
    """A run of an earlier version that was begun with one goes on."""
    optimizer = OptimizerConfig(schedule="wsd", warmup=0.9, cooldown=0.2)
    config = dataclasses.replace(run_of(), optimizer=optimizer)
    refused(config, whole, "cooldown = 0.2: the warm-up takes 0.9")
    with pytest.raises(UserError, match="cooldown"):
        train(config, tmp_path / "new")
    assert not (tmp_path / "new").exists()
    check_start(config, whole, fresh=False)


def test_a_scheme_whose_new_code_is_broken(whole, run_of, monkeypatch):
    """The finished run stays, whatever the step raises as it is traced."""
    monkeypatch.setattr(Plain, "advance", lambda self, stream, update, at: (stream, update @ jnp.ones(7)[0], 1.0))
    before = contents(whole)
    with pytest.raises(ValueError, match="matmul"):
        train(dataclasses.replace(run_of(), scheme=Plain()), whole, fresh=True)
    assert contents(whole) == before


def test_errors_of_fit_name_its_arguments(whole, corpus):
    with pytest.raises(UserError, match=r"another out \(fresh=True deletes it\)"):
        nagjax.fit("plain", depth=3, data=corpus, out=whole)


def test_fit_says_that_it_opened_a_finished_run(corpus, tmp_path, capsys):
    size = dict(depth=2, width=16, heads=2, context=16, steps=1, batch=4, eval_batches=1, mesh={"data": 1})
    told = []
    for fresh in (False, False, True):
        nagjax.fit("plain", data=corpus, out=tmp_path / "run", fresh=fresh, **size)
        told.append(f"opened the finished run in {tmp_path / 'run'}; fresh=True trains anew" in capsys.readouterr().out)
    assert told == [False, True, False]
