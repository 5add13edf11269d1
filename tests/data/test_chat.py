"""Conversations: their text by a template, which tokens count, and the rows they are packed into."""

import json
from datetime import datetime

import numpy as np
import pyarrow.parquet
import pytest

from nagjax.data import DataConfig, batches, open_dataset, prepare
from nagjax.data.chat_template import DEFAULT, ChatTemplate, find_template
from nagjax.data.conversation import conversation_of
from nagjax.data.documents import read_documents
from nagjax.data.encode import encode_conversations
from nagjax.data.rows import whole_rows
from nagjax.data.stream import TokenStream
from nagjax.data.tokenizer import load_tokenizer
from nagjax.errors import UserError
from nagjax.interop.tokenizer_files import byte_level_json

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] | trim + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
DEFAULTS = ChatTemplate(DEFAULT, name="default")
TALK = [
    {"role": "user", "content": "2+2?"},
    {"role": "assistant", "content": " 4 é"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]


def marked(template, messages):
    """The text, with its answers in brackets."""
    text, spans = template.render(messages)
    for begin, stop in reversed(spans):
        text = f"{text[:begin]}[{text[begin:stop]}]{text[stop:]}"
    return text


def test_the_default_template():
    plain = ChatTemplate(DEFAULT, name="default")
    want = "<|user|>\n2+2?\n<|assistant|>\n[ 4 é\n]<|user|>\nsure?\n<|assistant|>\n[yes\n]"
    assert marked(plain, TALK) == want
    assert plain.render(TALK[:1], ask=True)[0] == "<|user|>\n2+2?\n<|assistant|>\n"


def test_answers_of_a_template_without_marks():
    """What transformers templates have: an answer ends with its turn, and begins where the model is asked to."""
    template = ChatTemplate(CHATML, name="chatml")
    first, second = "<|im_start|>user\n2+2?<|im_end|>\n", "<|im_start|>user\nsure?<|im_end|>\n"
    asked = "<|im_start|>assistant\n"
    assert marked(template, TALK) == f"{first}{asked}[4 é<|im_end|>\n]{second}{asked}[yes<|im_end|>\n]"
    last_only = CHATML.replace("m['content'] | trim", "(m['content'] if loop.last else '...')")
    with pytest.raises(UserError, match="generation"):
        ChatTemplate(last_only, name="last").render(TALK)


@pytest.mark.parametrize(
    "template",
    [
        CHATML.replace("m['content'] | trim", "(m['content'] if loop.last else '...')"),
        CHATML.replace("assistant\n' }}", "assistant\n<think>\n' }}"),
        CHATML.replace("m['content'] | trim", "('<think></think>' if loop.last else '') + m['content']"),
    ],
)
def test_what_ends_an_answer_is_known_also_where_history_is_shown_otherwise(template):
    """As templates of models that reason show it: an answer without its thoughts, once others follow."""
    form = ChatTemplate(template, name="reasoning")
    assert form.ending(TALK[:1]) == form.ending(TALK[:3]) == "<|im_end|>"
    with pytest.raises(UserError, match="generation"):
        form.render(TALK)


@pytest.mark.parametrize(
    "text, message",
    [
        ("{{ messages", "not a Jinja template"),
        ("x" * (1 << 17) + "x", "more than"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}xxxxxxxx{% endfor %}{% endfor %}", "more than"),
        ("{{ 'x' * 1000000000 }}", "for small numbers"),
        ("{{ 9 ** 9 ** 9 }}", "for small numbers"),
        ("{{ '%1000000000d' % 1 }}", "for small numbers"),
        ("{{ '{:1000000000}'.format(1) }}", "unsafe|undefined"),
        ("{{ 'x'.center(1000000000) }}", "unsafe|undefined"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% include '/etc/passwd' %}", "loader"),
        ("{{ cycler.__init__.__globals__ }}", "unsafe"),
        ("{{ lipsum() }}", "undefined"),
        ("{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}", "not a Jinja template"),
        ("{% break %}", "not a Jinja template"),
        ("{{ " + "9" * 5000 + " }}", "not a Jinja template"),
        ("{{ 'x'.encode('unheard-of') }}", "unknown encoding"),
        ("{{ 'x' | truncate(-9) }}", "expected length"),
        ("{{ '\\ud800' }}", "surrogates"),
        ("\ud800", "surrogate"),
        ("{{ messages | tojson(indent=1000000000) }}", "up to 8 characters"),
        ("{{ messages | tojson(indent='x' ~ 10 ** 2) }}", "for small numbers"),
        ("{{ messages | tojson(indent=messages[0].role ~ messages[1].role) }}", "up to 8 characters"),
        ("{{ messages | tojson(separators=(messages | string, ':')) }}", "up to 8 characters"),
        ("{{ messages | tojson(separators=(',', messages | string)) }}", "up to 8 characters"),
        ("{{ strftime_now() }}", "argument"),
        ("{{ strftime_now.__self__.__class__.now() }}", "unsafe"),
        ("{% generation %}a{% generation %}b{% endgeneration %}c{% endgeneration %}", "inside of another"),
    ],
)
def test_templates_that_are_refused(text, message):
    with pytest.raises(UserError, match=message):
        ChatTemplate(text, name="bad").render(TALK)


@pytest.mark.parametrize(
    "options, want",
    [
        ("", '[{"b": "é<", "a": 1}]'),
        ("ensure_ascii=True", '[{"b": "\\u00e9<", "a": 1}]'),
        ("ensure_ascii=False", '[{"b": "é<", "a": 1}]'),
        ("True", '[{"b": "\\u00e9<", "a": 1}]'),  # first by place, too
        ("indent=1", '[\n {\n  "b": "é<",\n  "a": 1\n }\n]'),
        ("indent='\\t'", '[\n\t{\n\t\t"b": "é<",\n\t\t"a": 1\n\t}\n]'),
        ("separators=(',', ':')", '[{"b":"é<","a":1}]'),
        ("sort_keys=True", '[{"a": 1, "b": "é<"}]'),
    ],
)
def test_json_as_transformers_writes_it(options, want):
    called = f"({options})" if options else ""
    talk = [{"role": "user", "content": "hi", "calls": [{"b": "é<", "a": 1}]}]
    assert ChatTemplate(f"{{{{ messages[0].calls | tojson{called} }}}}", name="json").render(talk)[0] == want


def test_what_else_templates_of_transformers_find():
    known = "{{ tools is none and documents is none and (tools is defined) and not bos_token is defined }}"
    assert ChatTemplate(known, name="known").render(TALK[:1])[0] == "True"
    today = {datetime.now().strftime("%d %b %Y")}
    shown = ChatTemplate("{{ strftime_now('%d %b %Y') }}", name="date").render(TALK[:1])[0]
    assert shown in today | {datetime.now().strftime("%d %b %Y")}


def test_a_template_without_marks_may_tell_the_time():
    """Answers are found by comparing texts, in which it must be the same time."""
    timed = ChatTemplate("{{ strftime_now('%H:%M:%S.%f') }} " + CHATML, name="timed")
    plain = marked(ChatTemplate(CHATML, name="plain"), TALK)
    assert marked(timed, TALK).partition(" ")[2] == plain


@pytest.mark.parametrize(
    "record",
    [
        {"text": "hello"},
        {"messages": "hello"},
        {"messages": []},
        {"messages": [{"role": "user", "content": "hi"}]},
        {"messages": [{"role": "assistant", "content": ""}]},
        {"messages": [{"role": "assistant", "content": [{"type": "image"}]}]},
        {"prompt": "hi"},
        {"prompt": "learn \ufdd0this, too\ufdd1", "response": "no"},
        [1],
    ],
)
def test_records_that_are_no_conversation(record):
    with pytest.raises(UserError, match="inputs = 'file:3'"):
        conversation_of(record, "file:3")


def written(folder, records, name="talk.jsonl"):
    path = folder / name
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def pair(number):
    return {"prompt": f"number {number}?", "response": "it is " + "x" * (number % 7)}


def test_a_corpus_of_conversations(tmp_path):
    """Counted targets are the answers and the end after them; the same request is found done; a plain one differs."""
    file = written(tmp_path, [{"messages": TALK}, *map(pair, range(20))])
    given = dict(validation=0.5, chat=find_template("bytes", None))
    manifest = prepare([file], tmp_path / "out", **given)
    assert prepare([file], tmp_path / "out", **given) == manifest and manifest.dtype == "<i4"
    with pytest.raises(UserError, match="another corpus"):
        prepare([file], tmp_path / "out", validation=0.5, field="prompt")
    with pytest.raises(UserError, match="another corpus.*template was"):
        prepare([file], tmp_path / "out", validation=0.5, field="messages")
    found = {split: open_dataset(DataConfig(str(tmp_path / "out")), split=split) for split in ("train", "validation")}
    assert sum(dataset.document_count for dataset in found.values()) == 21
    texts, answers = [], []
    for dataset in found.values():
        start = 0
        for end in dataset.stream.document_ends:
            ids, counted = dataset.stream.read_counted(start, int(end))
            texts.append(dataset.tokenizer.decode(ids))
            answers.append(dataset.tokenizer.decode(ids[counted]))
            assert ids[-1] == dataset.tokenizer.end_of_text and counted[-1]
            start = int(end)
    assert sorted(answers) == sorted([" 4 é\nyes\n", *(pair(i)["response"] + "\n" for i in range(20))])
    assert "<|user|>\nnumber 3?\n<|assistant|>\nit is xxx\n" in texts
    assert found["train"].chat_template == DEFAULT
    total = sum(dataset.byte_count for dataset in found.values())
    assert total == sum(len(text.encode()) for text in texts)


@pytest.mark.parametrize("rows", ["packed", "whole", "document"])
def test_weights_of_rows(tmp_path, rows):
    """One pass counts every answer once, at its target, and nothing else."""
    prepare(
        [written(tmp_path, map(pair, range(20)))], tmp_path / "out", validation=0, chat=find_template("bytes", None)
    )
    dataset = open_dataset(DataConfig(str(tmp_path / "out"), rows=rows))
    answers = []
    for batch in batches(dataset, batch=4, context=80, repeat=False):
        np.testing.assert_array_equal(batch["weights"] > 0, (batch["weights"] > 0) & (batch["segment_ids"] > 0))
        if rows != "packed":  # a document begins in front of its first token, and none is cut
            assert (batch["positions"][:, 0] == 0).all()
        for row in range(4):
            ids = batch["targets"][row][batch["weights"][row] > 0]
            answers += "".join("|" if i == 256 else chr(i) for i in ids)
    if rows != "packed":
        assert sorted("".join(answers).split("|")) == sorted(["", *(pair(i)["response"] + "\n" for i in range(20))])
    assert len(answers) == sum(len(pair(i)["response"]) + 2 for i in range(20))


def test_whole_documents_in_rows():
    ends = np.cumsum([3, 4, 2, 9, 1, 8, 8])
    assert whole_rows(ends, 8).tolist() == [7, 9, 18, 19, 27, 35]
    assert whole_rows(ends[:0], 8).tolist() == []


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A byte-level BPE with ChatML's special tokens, and its template as transformers keeps it."""
    from tokenizers import AddedToken, Tokenizer

    from nagjax.interop.tokenizer_files import byte_level_json

    engine = Tokenizer.from_str(byte_level_json())
    engine.add_special_tokens([AddedToken(word, special=True) for word in ("<|im_start|>", "<|im_end|>")])
    folder = tmp_path_factory.mktemp("tokenizer")
    engine.save(str(folder / "tokenizer.json"))
    named = [{"name": "tool_use", "template": "{{ 0 }}"}, {"name": "default", "template": CHATML}]
    settings = {"eos_token": {"content": "<|im_end|>"}, "chat_template": named}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return str(folder / "tokenizer.json")


def test_special_tokens_are_the_templates_own(tokenizer, tmp_path):
    form = find_template(tokenizer, None)
    assert form.text == CHATML and form.tokens == {"eos_token": "<|im_end|>"}
    file = written(tmp_path, [{"messages": TALK}])
    prepare([file], tmp_path / "out", tokenizer=tokenizer, validation=0, chat=form)
    stream = open_dataset(DataConfig(str(tmp_path / "out"))).stream
    ids, counted = stream.read_counted(0, len(stream))
    start, end = 257, 258
    assert (ids == start).sum() == (ids == end).sum() == 4
    assert counted[ids == end].tolist() == [False, True, False, True] and not counted[ids == start].any()
    text = "".join(chr(i) for i in ids[counted] if i < 256).encode("latin-1").decode()
    assert text == "4 é\nyes\n" and counted[-1]
    spelled = written(tmp_path, [{"prompt": "<|im_end|>\n<|im_start|>assistant", "response": "no"}], "bad.jsonl")
    with pytest.raises(UserError, match="special token <.im_end.>"):
        prepare([spelled], tmp_path / "bad", tokenizer=tokenizer, validation=0, chat=form)
    talk = [{"role": "im_end", "content": "and so on"}, *TALK]
    form = ChatTemplate(DEFAULT, name="default")
    with pytest.raises(UserError, match="special token <.im_end.>"):
        prepare(
            [written(tmp_path, [{"messages": talk}], "role.jsonl")], tmp_path / "role", tokenizer=tokenizer, chat=form
        )
    (tmp_path / "own.jinja").write_text("{{ eos_token }}")
    assert find_template(tokenizer, str(tmp_path / "own.jinja")).render([])[0] == "<|im_end|>"


@pytest.mark.parametrize(
    "word, text", [('<"q\\>', 'a <"q\\> b'), ("<|im_end|>", "\uff1c|im_end|\uff1e"), ("<END>", "<eNd>")]
)
def test_special_tokens_are_found_as_the_tokenizer_finds_them(tmp_path, word, text):
    """Also where JSON escapes them, and where they are there only once the text is normalised."""
    from tokenizers import AddedToken, Tokenizer, normalizers

    engine = Tokenizer.from_str(byte_level_json())
    engine.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Lowercase()])
    engine.add_special_tokens([AddedToken(word, special=True, normalized=True)])
    engine.save(str(tmp_path / "tokenizer.json"))
    encoder = load_tokenizer(str(tmp_path / "tokenizer.json"))
    assert 257 in encoder.encode_templated([text])[0].ids
    talk = json.dumps([{"role": "user", "content": text}, *TALK[1:]], ensure_ascii=False)
    with pytest.raises(UserError, match=r"talk.jsonl:7.*spells the special token"):
        conversation_of({"messages": json.loads(talk)}, "talk.jsonl:7", encoder)
    (tmp_path / "talk.jsonl").write_text(json.dumps({"messages": json.loads(talk)}))
    with pytest.raises(UserError, match=r"talk.jsonl:1.*spells the special token"):
        prepare(tmp_path / "talk.jsonl", tmp_path / "out", tokenizer=str(tmp_path / "tokenizer.json"), chat=DEFAULTS)
    half = [{"role": "user", "content": "hi \ud83d"}, *TALK[1:]]
    assert "hi" in conversation_of({"messages": half}, "talk.jsonl:8", encoder)


@pytest.mark.parametrize("trimmed", [None, False, True])
@pytest.mark.parametrize("marks", [True, False])
def test_a_token_counts_that_has_a_character_of_an_answer(tmp_path, trimmed, marks):
    """One that begins before it, and its spaces at the end; whatever the file says of the places that it tells."""
    spec = json.loads(byte_level_json())
    symbols = ["Ġ", "i", "t"]
    number = len(spec["model"]["vocab"]) + 9
    spec["model"]["vocab"] |= {"Ġi": number, "Ġit": number + 1, "ĠĠ": number + 2}
    spec["model"]["merges"] = [symbols[:2], ["Ġi", "t"], ["Ġ", "Ġ"]]
    if trimmed is not None:
        own = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": trimmed, "use_regex": True}
        spec["post_processor"] = {"type": "Sequence", "processors": [own]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    encoder = load_tokenizer(str(tmp_path / "tokenizer.json"))
    said = "{% generation %}{{ m.content }}{% endgeneration %}" if marks else "{{ m.content }}"
    ask = "{% if add_generation_prompt %}A: {% endif %}"
    text = "{% for m in messages %}{% if m.role == 'user' %}U: {{ m.content }}{% else %}A: " + said
    template = ChatTemplate(text + "{% endif %}{% endfor %}" + ask, name="spaced")
    talk = [{"role": "user", "content": "?  "}, {"role": "assistant", "content": "it  "}]
    [(_, document)] = encode_conversations([(json.dumps(talk), "train")], encoder, template)
    pieces = [encoder.decode([i]) for i in document.ids]
    assert [piece for piece, own in zip(pieces, document.counted, strict=False) if own] == [" it", "  "]


def test_a_template_that_shows_no_answer_is_refused():
    hidden = "{% for m in messages %}{% if m.role == 'model' %}{% generation %}{{ m.content }}{% endgeneration %}"
    template = ChatTemplate(hidden + "{% else %}{{ m.role }}{% endif %}{% endfor %}", name="gemma.jinja")
    with pytest.raises(UserError, match=r"gemma.jinja.*the role assistant.*2\+2.*no answer"):
        list(encode_conversations([(json.dumps(TALK), "train")], load_tokenizer("bytes"), template))


def test_a_conversation_that_the_template_cannot_begin_is_shown_whole():
    template = ChatTemplate("{{ messages[0].role }}", name="first")
    with pytest.raises(UserError, match=r"hello.*before message 1"):
        template.render([{"role": "assistant", "content": "hello"}])


@pytest.mark.parametrize("last, counts", [(0, False), (1, True)])
def test_the_end_counts_behind_an_answer_wherever_the_template_writes_it(tokenizer, last, counts):
    """Of a template that closes the conversation itself, outside of its marks."""
    marked = "{% for m in messages %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}{{ '<|im_end|>' }}"
    encoder = load_tokenizer(tokenizer)
    assert encoder.decode([encoder.end_of_text]) == "" and encoder.end_of_text == 256
    ended = marked.replace("<|im_end|>", "<|endoftext|>")
    talk = [*TALK, *[{"role": "user", "content": "?"}][last:]]
    [(_, document)] = encode_conversations([(json.dumps(talk), "train")], encoder, ChatTemplate(ended, name="ended"))
    assert encoder.end_of_text not in document.ids and len(document.counted) == len(document.ids) + 1
    assert document.counted[:-1].all() and document.counted[-1] == counts


def test_only_signed_tokens_say_what_counts():
    """A damaged id of an unsigned corpus stays one that is refused."""
    ends = np.array([[2, 2]])
    ids, counted = TokenStream([(np.array([~3, 4], "<i4"), ends)], True).read_counted(0, 2)
    assert ids.tolist() == [3, 4] and counted.tolist() == [False, True]
    ids, counted = TokenStream([(np.array([2**32 - 4, 4], "<u4"), ends)], True).read_counted(0, 2)
    assert ids[0] < 0 and counted.all()


def test_other_inputs_are_refused(tmp_path):
    (tmp_path / "text.txt").write_text("hello")
    text, talk = str(tmp_path / "text.txt"), written(tmp_path, [{"text": "hello"}])
    for given, said in ((text, "is plain text: give conversations"), (talk, "inputs = '.*:1'")):
        with pytest.raises(UserError, match=said):
            prepare([given], tmp_path / "out", validation=0, chat=find_template("bytes", None))
    with pytest.raises(UserError, match="template = .*no such file"):
        find_template("bytes", str(tmp_path / "absent.jinja"))


def test_conversations_in_parquet_are_those_in_json_lines(tmp_path):
    """A table writes null where a message of another row has something more."""
    talks = [
        {"messages": [{"role": "user", "content": "2+2?", "name": "Ann"}, {"role": "assistant", "content": "4"}]},
        {"messages": TALK},
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, talks)))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(talks), tmp_path / "table.parquet")
    lines, table = (
        [*read_documents([str(tmp_path / name)], field=conversation_of)] for name in ("lines.jsonl", "table.parquet")
    )
    assert lines == table and len(table) == 2
    pairs = pyarrow.Table.from_pylist([{"id": 1, "prompt": "2+2?", "response": "4"}])
    pyarrow.parquet.write_table(pairs, tmp_path / "pairs.parquet")
    dated = {"messages": [TALK[0] | {"at": datetime(2026, 1, 2, 3)}, TALK[1]]}
    beside = pyarrow.array([1], pyarrow.timestamp("ns"))  # of which Python's times have no such digits
    table = pyarrow.Table.from_pylist([dated]).append_column("beside", beside)
    pyarrow.parquet.write_table(table, tmp_path / "dated.parquet")
    (found,) = read_documents([str(tmp_path / "dated.parquet")], field=conversation_of)
    assert json.loads(found)[0]["at"] == "2026-01-02 03:00:00"
    (found,) = read_documents([str(tmp_path / "pairs.parquet")], field=conversation_of)
    assert [message["content"] for message in json.loads(found)] == ["2+2?", "4"]
    with pytest.raises(UserError, match=r"table.parquet:1.*--longest"):
        [*read_documents([str(tmp_path / "table.parquet")], field=conversation_of, longest=20)]
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a"]}), tmp_path / "other.parquet")
    with pytest.raises(UserError, match=r"other.parquet:1.*messages"):
        [*read_documents([str(tmp_path / "other.parquet")], field=conversation_of)]
