"""The tokens whose ways are told are those that the model reads."""

import dataclasses

import pytest
from tokenizers import Tokenizer, processors

from nagjax.data.tokenizer import load_tokenizer
from nagjax.errors import UserError
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
    assert run.beginning == [256] and found["tokens"] == ["", "a", "b"] and found["ran"].shape == (4, 3)
    with pytest.raises(UserError, match="at least one character"):
        token_paths(run, "")
