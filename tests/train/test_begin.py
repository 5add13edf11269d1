"""Training that starts from another run's parameters."""

import contextlib
import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.mod import ModConfig
from nagjax.model.config import ModelConfig
from nagjax.options import read_options
from nagjax.plan.order import started
from nagjax.residual import find_scheme
from nagjax.runs.config import DEFAULT_SCHEME, MeshConfig, RunConfig, to_dict
from nagjax.runs.folder import read_config
from nagjax.runs.metrics import comparable
from nagjax.runs.names import CONFIG, IDENTITY, LOCK
from nagjax.runs.opening import open_run
from nagjax.train.checkpoint.store import Checkpoints, steps_saved
from nagjax.train.facts import resolve
from nagjax.train.loop import train
from nagjax.train.warm_start import OF_THE_MACHINE, begin
from tests import tiny
from tests.tolerance import close_to


@pytest.fixture(scope="module")
def another(run_of):
    """`another(start)`: the config of a run that starts from one, with little else given."""

    def make(start: object, scheme: str = DEFAULT_SCHEME) -> RunConfig:
        options, mesh = run_of(keep=3).train, MeshConfig(data=1)
        return RunConfig(find_scheme(scheme)(), train=options, mesh=mesh, start=str(start))

    return make


@pytest.fixture(scope="module")
def first(run_of, tmp_path_factory):
    return train(dataclasses.replace(run_of(), data=DataConfig()), tmp_path_factory.mktemp("first") / "run")


@pytest.fixture(scope="module")
def begun(first, another, tmp_path_factory):
    """A run that started from `base` in its working directory, and its config."""
    folder = tmp_path_factory.mktemp("begun")
    shutil.copytree(first, folder / "base")
    config = another("base")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        return train(config, folder / "run"), config


def test_a_run_goes_on_from_another(first, another, tmp_path):
    """The first evaluation equals the other run's last one; model and scheme are that run's; the new run resumes."""
    second = tmp_path / "second"
    again = another(first, "plain")
    train(again, second)
    lines = {
        folder: [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        for folder in (first, second)
    }
    losses = {folder: [line["loss"] for line in own if line["kind"] == "eval"] for folder, own in lines.items()}
    assert losses[second][0] == close_to(losses[first][-1], terms=64, chain=24)
    assert losses[second][-1] != losses[second][0]
    opened = open_run(second)
    assert opened.config.scheme.name == "nag" and opened.config.scheme.ramp == 0.0
    assert opened.config.model.context == 16 and opened.config.start == str(first)
    before = jax.device_get(opened.params)
    values = json.loads((second / "config.json").read_text())
    del values["model"]["block"]  # as if written before there was such an option
    (second / "config.json").write_text(json.dumps(values))
    train(again, second)
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(open_run(second).params))


def test_the_cuts_of_a_routed_run_are_taken_over(run_of, tmp_path):
    """The first evaluation, before any step, lets tokens in by them."""
    config = run_of()
    routed = dataclasses.replace(config.model, mod=ModConfig(rate=(0.5,)))
    plan = tiny.blueprint(dataclasses.replace(config, model=routed))
    cuts = np.linspace(0.1, 0.4, routed.sublayers, dtype=np.float32)
    state = tiny.fresh(plan)
    assert not np.any(state.mod["cuts"] == cuts)
    base = tmp_path / "base"
    with Checkpoints(base / "checkpoints") as checkpoints:
        checkpoints.save(6, state._replace(mod=state.mod | {"cuts": jax.device_put(cuts)}))
    (base / CONFIG).write_text(json.dumps(to_dict(plan.config)))
    started_there = dataclasses.replace(plan, config=dataclasses.replace(plan.config, start=str(base)))
    begun = begin(started_there)
    np.testing.assert_array_equal(begun.mod["cuts"], cuts)
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(begun.params), jax.device_get(state.params))


def test_the_default_text_in_place_of_the_other_runs_is_told(first, run_of, tmp_path, capsys):
    """`--start` alone trains on the standard library, whatever the other run has read."""
    base = train(run_of(), tmp_path / "base")
    note = "the text is stdlib, the default: "
    for start, data, told in ((base, DataConfig(), True), (base, run_of().data, False), (first, DataConfig(), False)):
        config = RunConfig(find_scheme(DEFAULT_SCHEME)(), start=str(start), data=data)
        resolve(config)
        assert (note + f"{start} was trained on" in capsys.readouterr().err) == told
        started(config)  # a plan reads no text
        assert note not in capsys.readouterr().err


def test_a_run_that_has_begun_goes_on_without_the_one_it_started_from(begun, tmp_path, monkeypatch):
    run, config = begun
    monkeypatch.chdir(tmp_path)  # where no base is
    shutil.copytree(run, tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "6")
    train(config, tmp_path / "half")
    assert comparable(tmp_path / "half" / "metrics.jsonl") == comparable(run / "metrics.jsonl")
    with pytest.raises(UserError, match="start = .*base"):
        train(config, tmp_path / "half", fresh=True)


def test_a_run_that_has_saved_nothing_begins_again_with_the_same_weights(first, another, tmp_path):
    """Also when the run to start from has trained on in the meantime; if it has removed them, this is an error."""
    base = shutil.copytree(first, tmp_path / "base")
    (base / "checkpoints" / "6").rename(tmp_path / "6")
    (early,) = steps_saved(base / "checkpoints")
    whole = train(another(base), tmp_path / "whole")

    def stop(*_):
        raise ZeroDivisionError

    for folder in ("run", "gone"):
        with pytest.raises(ZeroDivisionError):
            train(another(base), tmp_path / folder, callback=stop)
        assert not steps_saved(tmp_path / folder / "checkpoints")
    (tmp_path / "6").rename(base / "checkpoints" / "6")
    for repeated in (True, False):
        with contextlib.suppress(ZeroDivisionError):
            train(another(base), tmp_path / "run", callback=stop if repeated else None)
    assert comparable(tmp_path / "run" / "metrics.jsonl") == comparable(whole / "metrics.jsonl")
    shutil.rmtree(base / "checkpoints" / str(early))
    before = contents(tmp_path / "gone")
    with pytest.raises(UserError, match=f"start = .*base.*its step {early}, which is gone: .*--fresh"):
        train(another(base), tmp_path / "gone")
    assert contents(tmp_path / "gone") == before
    elsewhere = shutil.copytree(tmp_path / "gone", tmp_path / "elsewhere")
    train(another(whole), elsewhere)  # from another run, whose steps are others
    train(another(base), tmp_path / "gone", fresh=True)
    assert comparable(tmp_path / "gone" / "metrics.jsonl") != comparable(whole / "metrics.jsonl")


def test_the_run_to_start_from_is_known_by_its_id(first, begun, tmp_path, monkeypatch):
    """However its folder is written, and where it has been moved to; those of older versions by where they lie. What is
    refused for an unfinished run is for a finished one, which is soon opened; but only the former notes the new place.
    """
    monkeypatch.chdir(tmp_path)
    base, (run, config) = shutil.copytree(first, tmp_path / "base"), begun
    run = shutil.copytree(run, tmp_path / "run")
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
    for start in ("base", "./moved", tmp_path / "moved", first):
        go_on_from(start)
    shutil.rmtree(run / "checkpoints" / "6")
    go_on_from("moved/")
    assert steps_saved(run / "checkpoints")[-1] == 6
    assert json.loads((run / CONFIG).read_text())["start"] == "moved/"
    go_on_from(first)
    (run / CONFIG).write_bytes(before[run / CONFIG])
    (run / IDENTITY).write_text(json.dumps({"id": json.loads((run / IDENTITY).read_text())["id"]}))
    before = contents(run)
    refused("moved")
    go_on_from("./base/")


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}


def test_what_of_the_model_is_given_in_vain_is_told(first, tmp_path, capsys):
    first = shutil.copytree(first, tmp_path / "first")
    values = json.loads((first / CONFIG).read_text())
    values["scheme"]["directions"] = 3
    (first / CONFIG).write_text(json.dumps(values))
    config = RunConfig(find_scheme("plain")(), ModelConfig(depth=5, context=16, remat="block"), start=str(first))
    adopted = resolve(config)
    assert (adopted.model.depth, adopted.model.context, adopted.model.remat) == (2, 16, "block")
    assert adopted.scheme == find_scheme("nag")(directions=3).trained()
    said = capsys.readouterr().err
    assert str(first) in said and said.endswith("not used of what is given: depth, scheme\n")
    resolve(adopted)
    values["model"] |= {"remat": "dots", "attention": "xla"}
    (first / CONFIG).write_text(json.dumps(values))
    kept = resolve(RunConfig(find_scheme(DEFAULT_SCHEME)(), start=str(first)))
    assert (kept.model.remat, kept.model.attention) == ("dots", "xla")
    assert not capsys.readouterr().err


@pytest.mark.parametrize("option", OF_THE_MACHINE)
def test_an_option_given_as_its_default_stands_against_the_run_to_start_from(first, tmp_path, capsys, option):
    first = shutil.copytree(first, tmp_path / "first")
    values = json.loads((first / CONFIG).read_text())
    default = getattr(ModelConfig(), option)
    other = {"dtype": "bfloat16", "remat": "block", "attention": "xla", "kernels": "xla"}[option]
    values["model"][option] = other
    (first / CONFIG).write_text(json.dumps(values))
    untold = read_options({"start": str(first)}).config()
    assert getattr(resolve(untold).model, option) == other != default
    told = read_options({"start": str(first), option: default}).config()
    assert getattr(resolve(told).model, option) == getattr(started(told).model, option) == default
    assert "given" not in to_dict(told)
    assert not capsys.readouterr().err


def test_what_is_given_in_vain_is_told_though_it_is_the_default(first, capsys):
    default = ModelConfig()
    resolve(read_options({"start": str(first), "depth": default.depth, "scheme": DEFAULT_SCHEME, "width": 96}).config())
    schemes = [] if read_config(first).scheme.name == DEFAULT_SCHEME else ["scheme"]
    assert read_config(first).model.depth != default.depth
    assert capsys.readouterr().err.endswith(
        f"not used of what is given: {', '.join(['depth', 'width', *schemes])}\n"
    ), "no size that follows"


def test_a_corpus_of_another_tokenizer_is_refused(first, tmp_path):
    from nagjax.interop.tokenizer_files import byte_level_json

    (tmp_path / "other.json").write_text(byte_level_json())
    data = DataConfig(tokenizer=str(tmp_path / "other.json"))
    with pytest.raises(UserError, match="start = .*reads bytes, and the corpus is made with the tokenizer 'other'"):
        train(RunConfig(find_scheme("plain")(), data=data, start=str(first)), tmp_path / "second")
    assert not (tmp_path / "second").exists()


@pytest.mark.parametrize(
    ("vocab", "said"), [(None, "came without a tokenizer.json"), (300, "has 257 tokens, the run was trained with 300")]
)
def test_bytes_are_not_the_tokens_of_a_run_whose_tokenizer_is_not_there(first, another, tmp_path, vocab, said):
    """One that was imported without, or has lost it."""
    start = shutil.copytree(first, tmp_path / "first")
    (start / "origin.json").write_text(json.dumps({"tokenizer_vocab": vocab, "end_of_text": 0}))
    with pytest.raises(UserError, match=said):
        train(another(start), tmp_path / "second")
    assert not (tmp_path / "second").exists()
