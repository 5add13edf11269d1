"""The tokens whose ways are told are those that the model reads."""

import dataclasses

import pytest
from tokenizers import Tokenizer, processors

from nagjax.data.tokenizer import load_tokenizer
from nagjax.errors import UserError
from nagjax.generate import paths
from nagjax.generate.paths import token_paths
from nagjax.interop.tokenizer_files import byte_level_json
from nagjax.runs.opening import open_run


def test_what_a_tokenizer_puts_in_front_is_read(run_folder, tmp_path):
    engine = Tokenizer.from_str(byte_level_json())
    engine.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 256)]
    )
    (tmp_path / "front.json").write_text(engine.to_str())
    run = dataclasses.replace(open_run(run_folder), tokenizer=load_tokenizer(str(tmp_path / "front.json")))
    found = token_paths(run, "ab")
    assert run.beginning == [256] and found["tokens"] == ["<|endoftext|>", "a", "b"] and found["ran"].shape == (4, 3)
    with pytest.raises(UserError, match="at least one character"):
        token_paths(run, "")


def test_parts_of_a_character_and_the_end_of_a_long_file_are_told(run_folder, tmp_path, monkeypatch, capsys):
    found = token_paths(open_run(run_folder), "aé")
    assert found["tokens"] == ["a", "<0xC3>", "<0xA9>"]
    monkeypatch.setattr(paths, "MOST_CHARACTERS", 3)
    (tmp_path / "text.txt").write_text("abc")
    assert paths.read_text(None, tmp_path / "text.txt") == "abc" and not capsys.readouterr().err
    (tmp_path / "text.txt").write_text("abcd")
    assert paths.read_text(None, tmp_path / "text.txt") == "abc"
    assert capsys.readouterr().err == f"read the first 3 characters of {tmp_path / 'text.txt'}\n"
