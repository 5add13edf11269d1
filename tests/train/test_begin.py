"""Training that starts from another run's parameters."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.model.config import ModelConfig
from nagjax.residual import find_scheme
from nagjax.runs.config import DEFAULT_SCHEME, RunConfig, TrainConfig
from nagjax.runs.metrics import comparable
from nagjax.runs.names import CONFIG, IDENTITY, LOCK
from nagjax.runs.opening import open_run
from nagjax.train.checkpoint.store import steps_saved
from nagjax.train.facts import resolve
from nagjax.train.loop import train
from tests import tiny
from tests.tolerance import close_to

OPTIONS = TrainConfig(steps=2, batch=8, eval_batches=2, eval_every=2, save_every=2)


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "run"
    train(tiny.run_config(find_scheme("nag")(directions=3), train=vars(OPTIONS), context=16), folder)
    return folder


def test_a_run_goes_on_from_another(first, tmp_path):
    """The first evaluation equals the other run's last one; model and scheme are that run's; the new run resumes."""
    second = tmp_path / "second"
    again = RunConfig(find_scheme("plain")(), train=OPTIONS, start=str(first))
    train(again, second)
    lines = {
        folder: [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (first, second)
    }
    losses = {folder: [line["loss"] for line in own if line["kind"] == "eval"] for folder, own in lines.items()}
    assert losses[second][0] == close_to(losses[first][-1], terms=64, chain=24)
    assert losses[second][-1] != losses[second][0]
    opened = open_run(second)
    assert opened.config.scheme.directions == 3 and opened.config.scheme.ramp == 0.0
    assert opened.config.model.context == 16 and opened.config.start == str(first)
    before = jax.device_get(opened.params)
    values = json.loads((second / "config.json").read_text())
    del values["model"]["block"]  # as if written before there was such an option
    (second / "config.json").write_text(json.dumps(values))
    train(again, second)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(open_run(second).params))


def test_the_default_text_in_place_of_the_other_runs_is_told(first, run_of, tmp_path, capsys):
    """`--start` alone trains on the standard library, whatever the other run has read."""
    base = train(run_of(steps=2, eval_every=2), tmp_path / "base")
    note = "the text is stdlib, the default: "
    for start, data, told in ((base, DataConfig(), True), (base, run_of().data, False), (first, DataConfig(), False)):
        config = RunConfig(find_scheme(DEFAULT_SCHEME)(), start=str(start), data=data)
        resolve(config)
        assert (note + f"{start} was trained on" in capsys.readouterr().err) == told


def test_a_run_that_has_begun_goes_on_without_the_one_it_started_from(first, tmp_path):
    base, longer = shutil.copytree(first, tmp_path / "base"), dataclasses.replace(OPTIONS, steps=4, keep=3)
    config = RunConfig(find_scheme(DEFAULT_SCHEME)(), train=longer, start=str(base))
    train(config, tmp_path / "run")
    shutil.copytree(tmp_path / "run", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "4")
    shutil.rmtree(base)
    train(config, tmp_path / "half")
    assert comparable(tmp_path / "half" / "metrics.jsonl") == comparable(tmp_path / "run" / "metrics.jsonl")
    with pytest.raises(UserError, match="run = .*base"):
        train(config, tmp_path / "half", fresh=True)


def test_the_run_to_start_from_is_known_by_its_id(first, tmp_path, monkeypatch):
    """However its folder is written, and where it has been moved to; those of older versions by where they lie."""
    monkeypatch.chdir(tmp_path)
    base = shutil.copytree(first, tmp_path / "base")
    config = RunConfig(find_scheme(DEFAULT_SCHEME)(), train=dataclasses.replace(OPTIONS, steps=4, keep=3), start="base")
    run = train(config, tmp_path / "run")
    shutil.rmtree(run / "checkpoints" / "4")
    before = contents(run)

    def go_on_from(start):
        train(dataclasses.replace(config, start=str(start)), run)

    def refused(start):
        with pytest.raises(UserError, match=f"start was 'base' and is now {str(start)!r}; give these as they were"):
            go_on_from(start)
        assert contents(run) == before

    other = shutil.copytree(first, tmp_path / "other")
    (other / IDENTITY).write_text('{"id": "another"}')
    for start in (other, "nowhere", ""):
        refused(start)
    base.rename(tmp_path / "moved")
    shutil.copytree(other, base)
    with pytest.raises(UserError, match="start was .'base', '.*'. and is now .'base', 'another'."):
        go_on_from("base")
    shutil.rmtree(base)
    for start in ("base", "moved/", "./moved", tmp_path / "moved", first):
        go_on_from(start)
        assert steps_saved(run / "checkpoints")[-1] == 4
        shutil.rmtree(run / "checkpoints" / "4")
    (run / CONFIG).write_bytes(before[run / CONFIG])
    (run / IDENTITY).write_text(json.dumps({"id": json.loads((run / IDENTITY).read_text())["id"]}))
    before = contents(run)
    refused("moved")
    go_on_from("./base/")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}


def test_what_of_the_model_is_given_in_vain_is_told(first, capsys):
    config = RunConfig(find_scheme("plain")(), ModelConfig(depth=5, context=16, remat="block"), start=str(first))
    adopted = resolve(config)
    assert (adopted.model.depth, adopted.model.context, adopted.model.remat) == (3, 16, "block")
    said = capsys.readouterr().err
    assert str(first) in said and said.endswith("not used of what is given: depth, scheme\n")
    resolve(adopted)
    resolve(RunConfig(find_scheme(DEFAULT_SCHEME)(), start=str(first)))
    assert not capsys.readouterr().err


def test_a_corpus_of_another_tokenizer_is_refused(first, tmp_path):
    from nagjax.interop.tokenizer_files import byte_level_json

    (tmp_path / "other.json").write_text(byte_level_json())
    data = DataConfig(tokenizer=str(tmp_path / "other.json"))
    with pytest.raises(UserError, match="start = .*reads bytes, the corpus other"):
        train(RunConfig(find_scheme("plain")(), data=data, start=str(first)), tmp_path / "second")
    assert not (tmp_path / "second").exists()
