"""Where a text that is written ends: at its document's end, at what an imported model names, at a stop text."""

import dataclasses
import json

import pytest

import nagjax
from nagjax.cli import main
from nagjax.errors import UserError
from nagjax.generate import sample
from nagjax.interop.exporting import export
from nagjax.residual import find_scheme
from tests.generate.test_answers import with_turns
from tests.interop.test_export import run_of

TURN = 258  # <|im_end|>


@pytest.fixture
def model(tmp_path):
    """A little model's folder, whose tokenizer has special tokens for turns."""
    run = dataclasses.replace(
        run_of(find_scheme("plain")(), tmp_path / "run", vocab=259), tokenizer=with_turns(tmp_path)
    )
    export(run, tmp_path / "model")
    return tmp_path / "model"


def named(model, config, generation=None):
    values = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(values | {"eos_token_id": config}))
    if generation is not None:
        (model / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    return model


@pytest.mark.parametrize(
    ("config", "generation", "eos"),
    [(TURN, None, (TURN,)), ([TURN, 256], 257, (TURN, 256, 257)), (None, [256], (256,)), (-1, [259, True, "2"], ())],
)
def test_both_files_may_name_tokens_one_or_several(model, tmp_path, config, generation, eos):
    named(model, config, generation)
    assert nagjax.load(model).eos == eos
    assert main(["import", str(model), "--out", str(tmp_path / "imported")]) == 0
    assert nagjax.load(tmp_path / "imported").eos == eos


def test_a_text_ends_at_what_the_model_names(model):
    run = nagjax.load(model)
    whole = sample.generate(run.model, [list(b"x = ")], tokens=10, temperature=0.0)[0]
    at = next(at for at in range(1, 10) if whole[at] not in whole[:at])
    run = nagjax.load(named(model, TURN, [whole[at]]))
    assert sample.complete(run, "x = ", tokens=10, temperature=0.0) == [run.tokenizer.decode(whole[:at])]


def test_a_stop_text_that_is_a_special_token_is_that_token(model, monkeypatch):
    """Decoded texts do not show it."""
    run, written = nagjax.load(named(model, 256)), [*b"4", TURN, *b"9"]
    assert run.tokenizer.decode(written) == "49"
    seen = {}
    monkeypatch.setattr(sample, "generate", lambda *_, **options: seen.update(options) or [written[:1]])
    assert sample.complete(run, "2+2=", stop=["<|im_end|>", "9"]) == ["4"]
    assert seen["ends"] == (256, TURN)


def test_a_file_that_cannot_be_read_is_named(model):
    (model / "generation_config.json").write_text("{")
    with pytest.raises(UserError, match="generation_config.json.*remove it"):
        nagjax.load(model)
