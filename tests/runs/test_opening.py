"""Opening a run folder, and text through it."""

import json
import shutil

import chex
import jax
import numpy as np
import pytest

from nagjax.data import train_bpe
from nagjax.errors import UserError
from nagjax.generate.sample import complete, fitting_tokens, generate
from nagjax.runs.opening import open_run
from tests.tiny_models import full_logits, shaken

STEP = 30  # as the run folder has it


@pytest.fixture(scope="module")
def run(run_folder):
    return open_run(run_folder)


def edited(run_folder, folder, change) -> None:
    """A run folder with another config and no checkpoint."""
    config = json.loads((run_folder / "config.json").read_text())
    change(config)
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))


def test_the_newest_checkpoint_is_restored_exactly(run):
    saved = shaken(run.blueprint.init_params(0))
    chex.assert_trees_all_equal(run.params, saved)
    assert run.step == STEP and isinstance(run.step, int)
    assert run.config.scheme.name == "nag" and run.config.model.vocab == 257
    assert run.progress == STEP / 1000


def test_opening_changes_nothing(run_folder):
    leftover = run_folder / "checkpoints" / "40.orbax-checkpoint-tmp"  # a save in progress elsewhere
    leftover.mkdir()
    before = {path: path.stat().st_mtime_ns for path in run_folder.rglob("*")}
    assert open_run(run_folder).step == STEP
    assert {path: path.stat().st_mtime_ns for path in run_folder.rglob("*")} == before
    leftover.rmdir()


def test_a_text_alone_is_one_prompt_and_by_default_its_context_is_filled(run):
    (whole,) = complete(run, "def ", temperature=0.0)
    assert complete(run, ["def "], tokens=36, temperature=0.0) == [whole]  # of a context of 40
    assert fitting_tokens(run, "x" * 30) == 10 and fitting_tokens(run, [""]) == 39
    assert fitting_tokens(run, "x" * 30, slide=True) == 64


def test_complete_is_generate_through_the_tokenizer(run):
    prompts = ["document 1", "", "é"]
    ids = [list(text.encode()) for text in prompts]
    options = {"tokens": 12, "temperature": 0.0}
    written = generate(run.model, ids, end_of_text=256, progress=STEP / 1000, **options)
    assert complete(run, prompts, **options) == [bytes(row).decode(errors="replace") for row in written]
    likeliest = np.argmax(full_logits(run.model, [ids[0] + written[0]], STEP / 1000)[0], axis=-1)
    assert likeliest[len(ids[0]) - 1 : -1].tolist() == written[0]


def test_a_stop_text_ends_its_row(run):
    """The row ends before the text's first occurrence, although it is found only some tokens later."""
    prompts, options = ["document 1", "is"], {"tokens": 24, "temperature": 0.0}
    whole = complete(run, prompts, **options)
    stop = whole[0][3:5]
    want = [text.partition(stop)[0] for text in whole]
    assert complete(run, prompts, stop=[stop, "never"], **options) == want != whole
    assert complete(run, prompts, stop=stop, **options) == want
    for wrong in ([""], [3]):
        with pytest.raises(UserError) as error:
            complete(run, prompts, stop=wrong, **options)
        assert error.value.field == "stop"


def test_complete_survives_what_is_not_utf8(run):
    texts = complete(run, ["\ud800 lone surrogate", "fine"], tokens=12, seed=1)
    for text in texts:
        assert isinstance(text, str) and text.encode()


def test_not_a_run_folder(tmp_path):
    for folder, lacks in ((tmp_path, "there is no config.json in it"), (tmp_path / "absent", "no such folder")):
        with pytest.raises(UserError, match=lacks) as error:
            open_run(folder)
        assert error.value.field == "run"
    assert not (tmp_path / "absent").exists()


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"scheme": {}}', '{"scheme": "nag"}', "\xff"])
def test_unreadable_config(tmp_path, text):
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(UserError, match="config.json") as error:
        open_run(tmp_path)
    assert error.value.field in ("run", "scheme")


def test_unknown_scheme_suggests_the_nearest(run_folder, tmp_path):
    edited(run_folder, tmp_path, lambda config: config["scheme"].update(name="nagg"))
    with pytest.raises(
        UserError, match="'nag'.*a scheme of your own: install the package.*entry point.*residual/schemes/"
    ) as error:
        open_run(tmp_path)
    assert error.value.field == "scheme"


def test_no_checkpoint_yet(run_folder, tmp_path):
    edited(run_folder, tmp_path, lambda config: None)
    with pytest.raises(UserError, match="no checkpoint") as error:
        open_run(tmp_path)
    assert error.value.field == "run"
    assert not (tmp_path / "checkpoints").exists()


def test_another_tokenizer_in_the_folder(run_folder, corpus, tmp_path):
    edited(run_folder, tmp_path, lambda config: None)
    train_bpe([str(corpus.parent / "train.txt")], 270, tmp_path / "tokenizer.json")
    shutil.copytree(run_folder / "checkpoints", tmp_path / "checkpoints")
    with pytest.raises(UserError, match="trained with 257") as error:
        open_run(tmp_path)
    assert error.value.field == "tokenizer"


def test_a_run_outlives_its_corpus(run, run_folder, tmp_path):
    edited(run_folder, tmp_path, lambda config: config["data"].update(path=str(tmp_path / "gone")))
    shutil.copytree(run_folder / "checkpoints", tmp_path / "checkpoints")
    moved = open_run(tmp_path)
    assert complete(moved, ["a"], tokens=4, seed=1) == complete(run, ["a"], tokens=4, seed=1)


@pytest.mark.skipif(jax.device_count() < 2, reason="one device only")
def test_two_devices_write_the_same(run, run_folder):
    spread = open_run(run_folder, devices=jax.devices()[:2])
    prompts, options = ["document 1", "", "is"], {"tokens": 12, "seed": 2}
    assert complete(spread, prompts, **options) == complete(run, prompts, **options)
