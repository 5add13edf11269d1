"""Texts of strangers' files: they take a reader's time once, and do not steer a terminal or a page."""

import json
import time

import pytest

from nagjax.console import for_terminal, note, say, visible
from nagjax.data import ByteTokenizer
from nagjax.errors import UserError
from nagjax.interop.tokenizer_files import write_files
from nagjax.json_reader import parse_json
from nagjax.report.table import Cell, Table, to_markdown
from nagjax.runs.log import load_run
from nagjax.train.checkpoint.store import steps_saved
from tests.run_folders import eval_line, write_run

ESCAPES = "a\x1b]0;title\x07\x1b[31mb\x9b1mc\r\td\n"


def test_a_terminal_gets_no_control_characters(capsys):
    assert visible(ESCAPES) == "a?]0;title??[31mb?1mc?\td\n"
    say(ESCAPES)
    note(ESCAPES)
    assert not {"\x1b", "\x07", "\x9b", "\r"} & {*"".join(capsys.readouterr())}
    assert for_terminal(ESCAPES) == ESCAPES  # a pipe gets what the model wrote


def test_a_table_of_a_page_is_made_of_text_alone():
    table = Table(("scheme", "<img src=x>"), ((Cell("[a](javascript:b)|\nc\\"), Cell("1")),))
    text = to_markdown(table)
    assert "\\<img" in text and "\\[a](javascript:b)\\| c\\\\" in text and len(text.splitlines()) == 3


def test_half_a_surrogate_pair_in_a_log_is_damage(tmp_path):
    lines = [eval_line(10, 1.7)]
    run = write_run(tmp_path / "run", lines)
    with open(run / "metrics.jsonl", "a") as log:
        log.write('{"kind": "event", "step": 10, "message": "\\ud800"}\n' + json.dumps(lines[0]) + "\n")
    with pytest.raises(UserError, match="metrics.jsonl"):
        load_run(run)


def test_names_that_are_many_are_compared_once():
    text = "{" + ", ".join(f'"{i}": 0' for i in range(50_000)) + ', "7": 1}'
    began = time.perf_counter()
    with pytest.raises(ValueError, match="'7' is there twice"):
        parse_json(text)
    assert time.perf_counter() - began < 20  # it took minutes


@pytest.mark.parametrize("name", ["0300", "\u0663"])
def test_only_a_number_as_it_is_written_is_a_checkpoint(tmp_path, name):
    for folder in (name, "7"):
        (tmp_path / folder).mkdir()
    assert steps_saved(tmp_path) == [7]


def test_an_export_names_no_code_of_others(tmp_path):
    """Nor does it end in a traceback where the settings are damaged."""
    run, out = tmp_path / "run", tmp_path / "out"
    run.mkdir()
    settings = {"auto_map": {"AutoTokenizer": [None, "evil/code--mod.Tok"]}, "tokenizer_class": "LlamaTokenizerFast"}
    (run / "tokenizer_config.json").write_text(json.dumps(settings))
    out.mkdir()
    write_files(ByteTokenizer(), run, out)
    assert json.loads((out / "tokenizer_config.json").read_text()) == {"tokenizer_class": "LlamaTokenizerFast"}
    for damaged in ("[]", "null", "{"):
        (run / "tokenizer_config.json").write_text(damaged)
        with pytest.raises(UserError, match="tokenizer = .*tokenizer_config.json.*bring it back, or remove it"):
            write_files(ByteTokenizer(), run, out)
