"""A run's folder: what of somebody else's is left as it is, and what of a run that is no more is not taken over."""

import contextlib
import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from nagjax.data import DataConfig, open_dataset, prepare, train_bpe
from nagjax.errors import UserError
from nagjax.residual import find_scheme
from nagjax.runs import names
from nagjax.runs.config import RunConfig, TrainConfig
from nagjax.runs.folder import clear, prepare_folder, read_config
from nagjax.runs.identity import read_id

OTHERS = {
    "strict JSON": b'{"model_type": "qwen3"}',
    "an infinity": b'{"model_type": "mamba2", "time_step_limit": [0.0, Infinity]}',
    "a field twice": b'{"model_type": "a", "model_type": "b"}',
    "a large number": b'{"seed": 123456789012345678901234567890}',
    "a scheme that is none": b'{"scheme": "fp8"}',
    "a list": b"[]",
    "cut short": b'{"model_type"',
    "not UTF-8": b"\xff\xfe",
    "empty": b"",
}


@pytest.fixture
def begin(corpus):
    """`begin(folder, seed=1)`: what training does with a folder before its first step."""

    def go(folder, fresh=False, path=corpus, **train):
        data = DataConfig(path=str(path))
        config = RunConfig(find_scheme("plain")(), train=TrainConfig(**train), data=data)
        return prepare_folder(config, folder, open_dataset(data), fresh)

    return go


@pytest.fixture
def folder(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    return path


def contents(folder):
    return {path.relative_to(folder): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


def fill(folder, *left_out):
    """All files named as a run's, by somebody else."""
    for name in set(names.FILES) - {*left_out}:
        (folder / name).write_text("mine")


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_another_librarys_model_is_left_as_it_is(begin, folder, text, fresh):
    fill(folder)
    (folder / names.CONFIG).write_bytes(text)
    (folder / "model.safetensors").write_text("weights")
    (folder / names.CHECKPOINTS).mkdir()
    (folder / names.CHECKPOINTS / "epoch-3.pt").write_text("weights")
    (folder / names.CHECKPOINTS / "1000").mkdir()
    (folder / names.CHECKPOINTS / "1000" / "_CHECKPOINT_METADATA").write_text("{}")
    before = contents(folder)
    with pytest.raises(UserError, match=rf"{names.CONFIG} is not that of a run.*choose another --out"):
        begin(folder, fresh)
    assert contents(folder) == before


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("name", names.FILES)
def test_a_file_named_as_a_runs_is_neither_replaced_nor_taken_for_it(begin, folder, name, fresh):
    for make in (lambda path: path.write_text('{"mine": 1}'), lambda path: path.mkdir()):
        make(folder / name)
        before = contents(folder)
        with pytest.raises(UserError, match=rf"{name} is not that of a run.*choose another --out"):
            begin(folder, fresh)
        assert contents(folder) == before
        if (folder / name).is_file():
            (folder / name).unlink()


def test_the_tokenizer_that_the_run_reads_may_be_there(begin, folder, corpus):
    own = folder / names.TOKENIZER
    train_bpe([str(corpus.parent / "train.txt")], 270, own)
    own.write_text(json.dumps(json.loads(own.read_text()), indent=3))
    text = str(corpus.parent / "train.txt")
    prepare([text], folder / "corpus", tokenizer=str(own), validation=0.0, held_out=[str(corpus.parent / "held-0.txt")])
    begin(folder, path=folder / "corpus")
    assert read_config(folder).data.path == str(folder / "corpus")
    begin(folder, path=folder / "corpus", seed=1)


@pytest.mark.parametrize("name", names.OF_WEIGHTS)
def test_what_a_run_that_saved_nothing_has_left_is_not_the_next_ones(begin, folder, capsys, name):
    begin(folder)
    first = read_id(folder)
    begin(folder)
    assert not capsys.readouterr().err
    (folder / name).write_text("left")
    (folder / "notes.md").write_text("mine")
    begin(folder, seed=7)
    assert not (folder / name).exists() and name in capsys.readouterr().err
    assert read_id(folder) != first and read_config(folder).train.seed == 7
    assert (folder / "notes.md").read_text() == "mine"


def test_fresh_deletes_nothing_where_there_is_no_run(folder, capsys):
    fill(folder)
    (folder / names.TENSORBOARD).mkdir()
    (folder / names.CHECKPOINTS).mkdir()
    (folder / names.CHECKPOINTS / "best.pt").write_text("mine")
    (folder / names.CHECKPOINTS / "1000").mkdir()
    before = contents(folder)
    clear(folder)
    assert contents(folder) == before and not capsys.readouterr().err


@pytest.mark.parametrize("cut", range(12))
@pytest.mark.parametrize("identity", [True, False])  # runs of older versions have none
def test_a_deletion_that_was_cut_short_is_finished(begin, folder, monkeypatch, identity, cut):
    begin(folder)
    for name in (names.CALIBRATION, names.TOKENIZER, "notes.md"):
        (folder / name).write_text("{}")
    (folder / names.CHECKPOINTS / "2").mkdir(parents=True)
    if not identity:
        (folder / names.IDENTITY).unlink()
    done = []

    def killed_before(call):
        def counted(*given, **options):
            if len(done) == cut:
                raise KeyboardInterrupt
            done.append(given)
            return call(*given, **options)

        return counted

    for owner, name in ((Path, "rename"), (Path, "unlink"), (shutil, "rmtree")):
        monkeypatch.setattr(owner, name, killed_before(getattr(owner, name)))
    with contextlib.suppress(KeyboardInterrupt):
        clear(folder)
    monkeypatch.undo()
    clear(folder)
    assert contents(folder).keys() == {Path("notes.md")}


def test_a_config_is_a_runs_by_its_scheme(begin, folder):
    """However its other fields were changed by hand."""
    begin(folder)
    (folder / names.IDENTITY).unlink()
    values = dataclasses.asdict(TrainConfig(steps=5)) | {"spike": float("inf")}
    (folder / names.CONFIG).write_text(json.dumps({"scheme": {"name": "plain"}, "train": values}))
    begin(folder)
    assert read_config(folder).train.spike == 0.0
