"""Answers: asked for by the run's template, ended where it ends them, and learnt by a run that was trained on some."""

import io
import itertools
import json
from types import SimpleNamespace

import pytest

from nagjax.cli import main
from nagjax.data import DataConfig, open_dataset
from nagjax.data.chat_template import DEFAULT, ChatTemplate
from nagjax.data.preparation import prepare
from nagjax.data.tokenizer import ByteTokenizer, beginning_of, load_tokenizer
from nagjax.errors import UserError
from nagjax.generate import chat
from nagjax.interop.tokenizer_files import byte_level_json

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CONFIG = SimpleNamespace(model=SimpleNamespace(context=300))
ASKED = [{"role": "user", "content": "2+2?"}]


def with_turns(folder):
    """A tokenizer of bytes whose special tokens begin and end turns."""
    spec = json.loads(byte_level_json())
    extra = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    spec["added_tokens"] += [
        {"id": 257 + i, "content": f"<|im_{name}|>"} | extra for i, name in enumerate(("start", "end"))
    ]
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    return load_tokenizer(str(folder / "tokenizer.json"))


@pytest.fixture
def scripted(monkeypatch, tmp_path):
    """A model that writes what it is told to, and notes what it was asked; it is told when it may stop."""

    def run(tokenizer, template: str, written: list[int]):
        (tmp_path / "chat_template.jinja").write_text(template)
        seen = SimpleNamespace(asked=None, stopped=None)

        def generate(model, prompts, *, tokens, end_of_text, ends, finished=lambda row, new: False, **options):
            seen.asked, seen.tokens = prompts, tokens
            new = list(itertools.takewhile(lambda i: i not in (end_of_text, *ends), written))
            stops = [n for n in range(len(new)) if finished(0, new[:n])]
            stops += [len(new)] if len(new) < len(written) else []
            seen.stopped = stops[0] if stops else None
            return [new if seen.stopped is None else new[: seen.stopped] for _ in prompts]

        monkeypatch.setattr(chat, "generate", generate)
        opened = SimpleNamespace(folder=tmp_path, tokenizer=tokenizer, model=(), progress=1.0, mod={}, config=CONFIG)
        opened.eos, opened.step, opened.beginning = (), 0, beginning_of(tokenizer)
        return opened, seen

    return run


def test_what_ends_an_answer():
    assert ChatTemplate(CHATML, name="chatml").ending(ASKED) == "<|im_end|>"
    assert ChatTemplate(DEFAULT, name="default").ending(ASKED) == "<|user|>"
    bracketed = "{% for m in messages %}{{ '[' ~ m['content'] ~ ']' }}{% endfor %}"
    assert ChatTemplate(bracketed, name="brackets").ending(ASKED) == "]"
    last = "{% for m in messages %}{% if loop.last or m.role == 'user' %}{{ m.content }}{% endif %}{% endfor %}"
    assert ChatTemplate(last, name="last").ending(ASKED) == ""


def test_an_answer_ends_at_the_token_that_ends_its_turn(scripted, tmp_path):
    tokenizer = with_turns(tmp_path)
    run, seen = scripted(tokenizer, CHATML, [*b"4 <|im", 258, *b"more"])
    assert chat.answer(run, [ASKED]) == ["4 <|im"] and seen.stopped == 6
    start, end = 257, 258
    assert seen.asked == [[start, *b"user\n2+2?", end, *b"\n", start, *b"assistant\n"]]
    run, seen = scripted(tokenizer, CHATML, [*b"4", tokenizer.end_of_text, *b"more"])
    assert chat.answer(run, [ASKED]) == ["4"] and seen.stopped == 1
    assert chat.answer(run, iter([ASKED])) == ["4"]
    run, seen = scripted(tokenizer, CHATML, [*b"4=4"])
    run.eos = (*b"=",)
    assert chat.answer(run, [ASKED]) == ["4"]


def test_a_turn_may_end_in_text_before_its_special_token(scripted, tmp_path):
    """The text alone ends nothing, and is no part of the answer."""
    template = CHATML.replace("'<|im_end|>'", "'\nEND<|im_end|>'")
    run, seen = scripted(with_turns(tmp_path), template, [*b"4\n\nEND, they say\nEND", 258, *b"more"])
    assert chat.answer(run, [ASKED]) == ["4\n\nEND, they say"] and seen.stopped == len("4\n\nEND, they say\nEND")


def test_an_answer_has_as_many_tokens_as_fit(scripted):
    run, seen = scripted(ByteTokenizer(), DEFAULT, [65])
    for options, want in (({}, None), ({"slide": True}, 256), ({"tokens": 7}, 7)):
        chat.answer(run, [ASKED, [{"role": "user", "content": "?" * 150}]], **options)
        longest = max(map(len, seen.asked))
        assert seen.tokens == (want or 300 - longest)
    chat.answer(run, [ASKED])
    assert seen.tokens == 256


def test_an_answer_ends_where_the_users_turn_begins(scripted):
    """A template without special tokens writes nothing behind an answer."""
    run, seen = scripted(ByteTokenizer(), DEFAULT, [*b"4\n<|user|>\n3+3?"])
    assert chat.answer(run, [ASKED]) == ["4"] and seen.stopped == len("4\n<|user|>")
    assert bytes(seen.asked[0]).decode() == "<|user|>\n2+2?\n<|assistant|>\n"


@pytest.mark.parametrize(("front", "template"), [("", DEFAULT), ("<s>", DEFAULT), ("<s>", "<s>" + DEFAULT)])
def test_a_trained_run_is_asked_as_it_was_trained(front, template, scripted, tmp_path):
    """Up to where the answer begins the tokens are those of the training's row; an import has its template's alone."""
    spec = json.loads(byte_level_json())
    if front:
        spec["added_tokens"].append(spec["added_tokens"][0] | {"id": 257, "content": front})
        own = {front: {"id": front, "ids": [257], "tokens": [front]}}
        single = [{"SpecialToken": {"id": front, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
        spec["post_processor"] = {"type": "TemplateProcessing", "single": single, "pair": [], "special_tokens": own}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    (tmp_path / "talks.jsonl").write_text(json.dumps({"prompt": "2+2?", "response": "4"}))
    given = dict(tokenizer=str(tmp_path / "tokenizer.json"), validation=0.0, chat=ChatTemplate(template, name="own"))
    prepare([str(tmp_path / "talks.jsonl")], str(tmp_path / "corpus"), **given)
    dataset = open_dataset(DataConfig(path=str(tmp_path / "corpus"), rows="document"))
    row = dataset.source(64)[0]
    run, seen = scripted(dataset.tokenizer, template, [65])
    run.step = 1
    chat.answer(run, [ASKED])
    (asked,) = seen.asked
    assert asked == row["tokens"][: len(asked)].tolist()
    assert row["weights"][len(asked) - 1] == 1.0 and not row["weights"][: len(asked) - 1].any(), "the answer comes next"
    run.step = 0
    chat.answer(run, [ASKED])
    assert seen.asked == [asked[1:]]


def test_what_is_refused(scripted, tmp_path):
    run, _ = scripted(with_turns(tmp_path), CHATML, [])
    with pytest.raises(UserError, match="^messages = .*special token <.im_end.>"):
        chat.answer(run, [[{"role": "user", "content": "2+2?<|im_end|>"}]])
    with pytest.raises(UserError, match="message 1"):
        chat.answer(run, [[{"role": "user"}]])
    with pytest.raises(UserError, match="^messages = None"):
        chat.answer(run, [None])
    (tmp_path / "chat_template.jinja").unlink()
    with pytest.raises(UserError, match="no chat template.*--template"):
        chat.answer(run, [ASKED])
    assert chat.answer(run, [], template=__file__) == []


def test_an_answer_that_spells_a_special_token_does_not_end_the_talk(scripted, tmp_path, monkeypatch, capsys):
    run, seen = scripted(with_turns(tmp_path), CHATML, [*b"write <|im_end|>", 258])
    monkeypatch.setattr("nagjax.interop.load.load", lambda path: run)
    monkeypatch.setattr("nagjax.generate.weights.with_weights", lambda run, weights: run)
    monkeypatch.setattr("sys.stdin", io.StringIO("how?\n<|im_start|>\nthanks\n"))
    assert main(["chat", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert out == "write <|im_end|>\n" * 2 and err.count("goes on without this exchange") == 2
    assert "messages = " in err and bytes(i for i in seen.asked[0] if i < 256).startswith(b"user\nthanks")


def test_a_run_without_a_template_is_refused_before_anything_is_typed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr("nagjax.interop.load.load", lambda path: SimpleNamespace(folder=tmp_path))
    monkeypatch.setattr("nagjax.generate.weights.with_weights", lambda run, weights: run)
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    assert main(["chat", str(tmp_path)]) == 2
    assert "no chat template" in capsys.readouterr().err


def test_a_run_answers_as_it_was_taught(tmp_path, monkeypatch, capsys):
    """Through the commands: two questions, learnt by heart, then asked in a conversation."""
    talks = [{"prompt": "red?", "response": "stop"}, {"prompt": "green?", "response": "go on"}]
    (tmp_path / "talks.jsonl").write_text("\n".join(map(json.dumps, talks)))
    corpus, run = str(tmp_path / "corpus"), str(tmp_path / "run")
    told = ["data", "chat", str(tmp_path / "talks.jsonl"), "--out", corpus, "--held-out", str(tmp_path / "held.jsonl")]
    (tmp_path / "held.jsonl").write_text(json.dumps({"prompt": "blue?", "response": "who knows"}))
    assert main([*told, "--validation", "0"]) == 0
    shape = "--depth 1 --width 32 --context 48 --batch 4 --steps 80 --lr 0.02 --eval-every 80 --eval-batches 1"
    given = ["--mesh.data", "1", "--data.path", corpus, "--data.rows", "whole", "--out", run]
    assert main(["train", *shape.split(), *given]) == 0
    monkeypatch.setattr("sys.stdin", io.StringIO("green?\n\nred?\n"))
    capsys.readouterr()
    assert main(["chat", run, "--temperature", "0", "--tokens", "16"]) == 0
    assert capsys.readouterr().out.split("\n") == ["go on", "stop", ""]
