"""The models that come with a clone: opened by name in Python and on the command line, and what their cards say."""

import contextlib
import dataclasses
import io
import json
import platform
import shlex
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import nagjax
from models import make
from nagjax.cli import main
from nagjax.data import DataConfig, stdlib, train_bpe
from nagjax.errors import UserError
from nagjax.generate.evaluate import evaluate
from nagjax.interop import hub
from nagjax.interop.adapter import ADAPTER
from nagjax.interop.exporting import export
from nagjax.interop.importing import import_model
from nagjax.measure.skip_curve import calibrate
from nagjax.residual import find_scheme
from nagjax.runs.config import TrainConfig, to_dict
from tests import tiny
from tests.interop.parity import logits_of
from tests.interop.test_export import run_of
from tests.tolerance import assert_close

CARDS = sorted(hub.SHIPPED.glob("*/README.md"))


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A clone's models/ with one bundle, tiny, seen from an empty folder; the run it is of."""
    run = run_of(find_scheme("nag")(), tmp_path / "run")
    export(run, tmp_path / "models" / "tiny", format="bundle")
    monkeypatch.setattr(hub, "SHIPPED", tmp_path / "models")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return run


@pytest.fixture
def few_documents(tmp_path, monkeypatch):
    """In place of the standard library's sources."""
    monkeypatch.setattr(stdlib, "stdlib_documents", lambda: [f"def f{i}():\n    return {i}\n" * 9 for i in range(60)])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def test_a_name_opens_it(shipped):
    jax.tree.map(np.testing.assert_array_equal, nagjax.load("tiny").params, shipped.params)


def test_what_stands_here_comes_first(shipped, tmp_path):
    export(run_of(find_scheme("plain")(), tmp_path / "other"), "tiny", format="bundle")
    assert nagjax.load("tiny").config.scheme.name == "plain"


def test_a_wrong_name_is_refused_with_the_right_ones(shipped):
    with pytest.raises(UserError, match="run = 'tini'.*give the folder of a run or a model, tiny$"):
        nagjax.load("tini")


def test_where_a_run_is_asked_for_a_model_is_refused_with_the_way_to_one(shipped, tmp_path, capsys):
    assert main(["config", str(tmp_path / "models" / "tiny")]) == 2
    assert "is a model's folder, not a run's: nagjax import" in capsys.readouterr().err


def test_a_run_is_not_imported(tmp_path, capsys):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.json").write_text(json.dumps(to_dict(tiny.run_config(find_scheme("plain")()))))
    assert main(["import", str(run), "--out", str(tmp_path / "out")]) == 2
    assert f"source = '{run}': is a run already: every command opens it" in capsys.readouterr().err


def test_info_shows_a_model_s_configuration(shipped, tmp_path, capsys):
    assert main(["info", str(tmp_path / "models" / "tiny")]) == 0
    shown = capsys.readouterr().out
    assert main(["info", "tiny"]) == 0
    assert capsys.readouterr().out == shown and "parameters" in shown


def test_commands_take_the_name_and_write_nothing_into_it(shipped, tmp_path):
    before = {path: path.read_bytes() for path in (tmp_path / "models").rglob("*") if path.is_file()}
    assert main(["generate", "tiny", "--prompt", "ab", "--tokens", "4"]) == 0
    assert main(["map", "tiny", "--text", "abc"]) == 0
    assert main(["map", str(tmp_path / "models" / "tiny"), "--text", "ab"]) == 0
    assert main(["import", "tiny", "--out", "imported"]) == 0
    assert main(["map", "imported", "--text", "abc"]) == 0 and Path("imported", "map.png").exists()
    assert sorted(path.name for path in Path().iterdir()) == ["imported", "tiny-report"]
    assert {path: path.read_bytes() for path in (tmp_path / "models").rglob("*") if path.is_file()} == before


def test_imported_it_is_a_run_of_its_own_with_its_own_tokenizer(shipped, few_documents, tmp_path):
    """The tokenizer.json that it was trained with lay in a folder that nobody has."""
    learned = train_bpe(["stdlib"], shipped.config.model.vocab, tmp_path / "learned.json")
    data = DataConfig(tokenizer="gone.json")
    config = dataclasses.replace(shipped.config, data=data, train=TrainConfig(batch=2, steps=3))
    blueprint = dataclasses.replace(shipped.blueprint, config=config)
    run = dataclasses.replace(shipped, blueprint=blueprint, tokenizer=learned)
    export(run, tmp_path / "models" / "learned", format="bundle")
    imported = import_model("learned", "imported")
    assert imported.folder == Path("imported") and nagjax.load(imported.folder).step == run.step
    points = calibrate(imported.folder, [0.3], choose=0.3, batches=1, search_batches=1)
    assert points["chosen"] == 0.3 and nagjax.load(imported.folder).calibrated


@pytest.fixture
def optimised():
    """What is compiled is made for speed: a model's evaluation is long."""
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", before)


with_models = pytest.mark.skipif(not CARDS, reason="a clone's folder models/ has no model")
of_each = pytest.mark.parametrize("card", CARDS, ids=lambda path: path.parent.name)


@with_models
def test_the_folder_s_page_is_what_make_models_would_write():
    assert (hub.SHIPPED / "README.md").read_text() == make.index()


def test_a_model_is_made_again_in_place_of_the_one_before(few_documents, tmp_path, monkeypatch):
    """As in a clone, which has them; a small one, by commands in this process."""
    small = "--depth 1 --width 8 --context 16 --batch 8 --steps 2"
    train = f"nagjax train --scheme {{scheme}} --lr {{lr}} {small} --out {{scheme}}-24"
    runs, before = tmp_path / "runs", tmp_path / "nag-24" / "old.txt"
    for folder in (runs, before.parent):
        folder.mkdir()
    before.touch()
    for name, value in {"HERE": tmp_path, "RUNS": runs, "TRAIN": train, "run": in_process}.items():
        monkeypatch.setattr(make, name, value)
    monkeypatch.chdir(runs)
    make.make("nag", None)
    assert not before.exists() and "[nag-24](nag-24/README.md) | NAG |" in make.index()
    assert nagjax.load(before.parent).step == 2 and nagjax.log(before.parent).last_eval.step == 2


def in_process(command: str, cpu: int | None = None) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as told:
        assert main(shlex.split(command)[1:]) == 0
    return told.getvalue()


@with_models
@of_each
def test_a_model_has_the_adapter_of_this_version(card):
    assert (card.parent / ADAPTER.name).read_text() == ADAPTER.read_text()


@with_models
@of_each
def test_transformers_runs_a_model_in_the_dtype_of_its_file(reference, card):
    run = nagjax.load(card.parent.name)
    tokens = np.random.default_rng(0).integers(0, run.config.model.vocab, (1, 32))
    got, rounding = reference.load(card.parent, tokens, "auto"), 8 * run.config.model.sublayers
    assert_close(got, logits_of(run, tokens), terms=1, chain=rounding, dtype=jnp.bfloat16)


@with_models
@of_each
def test_a_model_is_what_its_card_says(card, optimised):
    told = card.read_text()
    run = nagjax.load(card.parent.name)
    count = sum(p.size for p in jax.tree.leaves(run.blueprint.parameters))
    assert f"| {count:,}, in bfloat16 here |" in told and run.step == run.config.train.steps
    assert sum(path.stat().st_size for path in card.parent.iterdir()) < 8e6
    last = nagjax.log(run).last_eval
    assert last.step == run.step
    if f"Python {platform.python_version()} " not in told:
        pytest.skip("trained and measured on another Python's standard library")
    found = evaluate(run, data="stdlib", batches=run.config.train.eval_batches)
    assert abs(found["loss"] - last.loss) < 0.01  # of the same text, from weights rounded to bfloat16
