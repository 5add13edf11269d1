"""Text that is not UTF-8 is replaced wherever a command takes some: as arguments and lines of input it has halves of
surrogate pairs, from which tokenizers and prints fail."""

import io
import json

import pytest

from nagjax.cli import main
from nagjax.data.chat_template import DEFAULT
from nagjax.data.tokenizer import ByteTokenizer
from nagjax.generate import chat
from nagjax.generate.sample import complete
from nagjax.generate.text import encodable
from nagjax.runs.opening import open_run

BYTES = b"caf\xe9 "
TEXT = BYTES.decode(errors="surrogateescape")  # as Python has an argument


def test_what_has_no_utf_8_form_is_replaced_and_nothing_else():
    assert encodable(TEXT) == "caf? " and encodable("\ud83d-\udcff") == "?-?"
    assert encodable("é \U0001f600\ufffd\x00") == "é \U0001f600\ufffd\x00" and encodable("") == ""


@pytest.fixture
def template(tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text(DEFAULT)
    return str(path)


COMMANDS = {
    "generate": lambda out: ["--prompt", TEXT, "--tokens", "2"],
    "generate several, timed": lambda out: ["--prompt", TEXT, "a", "--tokens", "2", "--speed"],
    "map": lambda out: ["--text", TEXT, "--out", str(out)],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands(run_folder, tmp_path, capsys, name):
    assert main([name.split()[0], str(run_folder), *COMMANDS[name](tmp_path)]) == 0
    said = capsys.readouterr().out
    if name == "map":
        said = "".join(json.loads((tmp_path / "map.json").read_text())["tokens"])
    assert said.startswith("caf? ")


@pytest.mark.parametrize("errors", ["strict", "surrogateescape"])  # of an input in UTF-8, and in the C locale
def test_lines_of_a_conversation(run_folder, template, monkeypatch, capsys, errors):
    asked, own = [], chat.generate
    monkeypatch.setattr(chat, "generate", lambda model, prompts, **o: asked.extend(prompts) or own(model, prompts, **o))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(BYTES + b"\nb\n"), "utf-8", errors=errors))
    said = ["--system", TEXT, "--template", template, "--tokens", "2", "--temperature", "0"]
    assert main(["chat", str(run_folder), *said]) == 0
    assert len(asked) == 2 and capsys.readouterr().out.count("\n") >= 2
    assert asked[0][0] == ByteTokenizer.end_of_text
    first = bytes(asked[0][1:]).decode()
    assert "caf? " in first and first.count("caf") == 2


def test_functions(run_folder, template):
    run = open_run(run_folder)
    assert len(complete(run, [TEXT], tokens=2)) == 1
    assert len(chat.answer(run, [[{"role": "user", "content": TEXT}]], template=template, tokens=2)) == 1
