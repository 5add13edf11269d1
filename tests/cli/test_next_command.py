"""What a command names as the next one works, or it says what is missing."""

import json

import pytest

from nagjax.cli import main
from tests.run_fixtures import corpus, run_folder  # noqa: F401


def conversations(folder):
    path = folder / "talk.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "response": f"it is {i}"}) + "\n" for i in range(6)))
    return path


def documents(folder):
    for i in range(3):
        (folder / f"{i}.txt").write_text(f"document {i}: the quick brown fox")
    return folder


@pytest.mark.parametrize("verb, make", [("prepare", documents), ("chat", conversations)])
@pytest.mark.parametrize(
    "share, empty, fix",
    [
        ("0", "validation", "--held-out FILES, with a larger --validation, or with more inputs"),
        ("0.999999", "train", "smaller"),
    ],
)
def test_a_corpus_with_an_empty_split_is_not_sent_to_training(tmp_path, capsys, verb, make, share, empty, fix):
    (tmp_path / "in").mkdir()
    for _ in range(2):  # the second time it is finished
        args = ["data", verb, make(tmp_path / "in"), "--out", tmp_path / "out", "--validation", share]
        assert main([str(arg) for arg in args]) == 0
        out = capsys.readouterr().out
        assert f"{empty} is empty, and training needs it" in out and fix in out and "train on it" not in out


def test_a_corpus_with_both_splits_is(tmp_path, capsys):
    (tmp_path / "in").mkdir()
    (tmp_path / "held.txt").write_text("held out")
    args = [
        "data",
        "prepare",
        documents(tmp_path / "in"),
        "--out",
        tmp_path / "my out",
        "--held-out",
        tmp_path / "held.txt",
    ]
    assert main([str(arg) for arg in [*args, "--validation", "0"]]) == 0
    out = capsys.readouterr().out
    assert f"train on it: nagjax train --data.path '{tmp_path / 'my out'}'" in out and "is empty" not in out


def test_generate_without_tokens_fills_a_short_context(run_folder, capsys):  # noqa: F811
    """The run's context is 40; a prompt that leaves no room is still refused."""
    assert main(["generate", str(run_folder), "--prompt", "def ", ""]) == 0
    assert main(["generate", str(run_folder), "--prompt", "x" * 40]) == 2
    assert "with 1 new ones it exceeds the context of 40" in capsys.readouterr().err


def test_a_folder_with_a_space_is_quoted_in_the_next_command(tmp_path, capsys):
    (tmp_path / "text").mkdir()
    out = tmp_path / "my own.json"
    assert main(["tokenizer", "train", str(documents(tmp_path / "text")), "--out", str(out), "--vocab", "258"]) == 0
    assert f"--tokenizer '{out}'" in capsys.readouterr().out
