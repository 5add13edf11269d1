import json
import pickle

import chex
import numpy as np
import pytest

from nagjax.data import ByteTokenizer, JsonTokenizer, load_tokenizer, stdlib, train_bpe
from nagjax.data.documents import split_name
from nagjax.errors import UserError

TEXTS = [
    "",
    "plain",
    "naïve Übung",
    "日本語 テキスト",
    "🙂🙃 family 👩‍👩‍👧",
    " \r\n\ttabs  and   spaces ",
    "\x00\x7f",
    "<|endoftext|>",
]


@pytest.fixture(params=["bytes", "bpe"])
def tokenizer(request):
    return load_tokenizer("bytes" if request.param == "bytes" else request.getfixturevalue("bpe"))


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_and_exact_bytes(tokenizer, text):
    ids = tokenizer.encode(text)
    assert ids.dtype == np.int32
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes[ids].sum() == len(text.encode())
    assert tokenizer.end_of_text not in ids


def test_table_and_batch_agree_with_single_encoding(tokenizer, texts):
    assert tokenizer.token_bytes.shape == (tokenizer.vocab_size,)
    assert tokenizer.token_bytes.dtype == np.int32
    assert tokenizer.token_bytes[tokenizer.end_of_text] == 0
    chex.assert_trees_all_equal(tokenizer.encode_batch(texts), [tokenizer.encode(text) for text in texts])


def test_each_bpe_entry_is_the_length_of_its_bytes(bpe):
    tokenizer = load_tokenizer(bpe)
    spec = json.loads(open(bpe, encoding="utf-8").read())
    # The symbol of a byte: itself where printable, else the next code point from 256 on.
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    byte_of = {chr(b): b for b in shown} | {chr(256 + i): b for i, b in enumerate(hidden)}
    for token, i in spec["model"]["vocab"].items():
        if i != tokenizer.end_of_text:
            assert tokenizer.token_bytes[i] == len(bytes(byte_of[c] for c in token))
    assert tokenizer.vocab_size == 400


def test_special_tokens_are_dropped_by_decode(tokenizer):
    ids = [*tokenizer.encode("ab"), tokenizer.end_of_text]
    assert tokenizer.decode(ids) == "ab"
    assert ByteTokenizer().decode(np.array([0xE2, 0x82])) == "\ufffd"


@pytest.mark.parametrize("where", ["plain", "vocabulary"])
def test_the_end_is_special_also_where_the_file_does_not_say_so(bpe, tmp_path, where):
    """Then it stands for no bytes, no text becomes it, and it is not shown."""
    spec = json.loads(open(bpe, encoding="utf-8").read())
    known = load_tokenizer(bpe)
    spec["model"]["vocab"]["<|endoftext|>"] = known.end_of_text
    for token in spec["added_tokens"]:
        token["special"] = False
    spec["added_tokens"] = [] if where == "vocabulary" else spec["added_tokens"]
    (tmp_path / "tokenizer.json").write_text(json.dumps(spec))
    found = load_tokenizer(str(tmp_path / "tokenizer.json"))
    again = JsonTokenizer(found.to_json(), name="again")
    for one in (found, again, pickle.loads(pickle.dumps(found))):
        assert one.end_of_text == known.end_of_text and one.vocab_size == known.vocab_size
        chex.assert_trees_all_equal(one.token_bytes, known.token_bytes)
        chex.assert_trees_all_equal(one.encode_batch(TEXTS), known.encode_batch(TEXTS))
        assert one.decode([*one.encode("ab"), one.end_of_text]) == "ab"
        assert one.special_in("a <|endoftext|>") == "<|endoftext|>"
    assert found.fingerprint == again.fingerprint != known.fingerprint


def test_fingerprint_follows_content_not_layout(bpe, tmp_path):
    spec = json.loads(open(bpe, encoding="utf-8").read())
    same = JsonTokenizer(json.dumps(spec, indent=7), name="other name")
    assert same.fingerprint == load_tokenizer(bpe).fingerprint != ByteTokenizer.fingerprint
    spec["added_tokens"].append({**spec["added_tokens"][0], "id": 400, "content": "<|more|>"})
    more = JsonTokenizer(json.dumps(spec), name="more")
    assert more.fingerprint != same.fingerprint and more.vocab_size == 401
    again = pickle.loads(pickle.dumps(more))
    assert again.fingerprint == more.fingerprint and again.end_of_text == more.end_of_text


def test_training_is_reproducible(jsonl, bpe, tmp_path):
    assert train_bpe([jsonl], 400, tmp_path / "again.json").fingerprint == load_tokenizer(bpe).fingerprint


def test_of_the_standard_library_it_is_learned_on_what_is_trained_on(monkeypatch, tmp_path):
    words = {"train": "seen", "validation": "hidden"}
    texts = [(split, f"{word} = {i}\n" * 40) for split, word in words.items() for i in range(60)]
    modules = [text for split, text in texts if split_name(text, stdlib.VALIDATION) == split]
    assert any("hidden" in text for text in modules)
    monkeypatch.setattr(stdlib, "stdlib_documents", lambda: modules)
    learned = train_bpe(["stdlib"], 280, tmp_path / "stdlib.json")
    assert len(learned.encode("seen")) == 1 and len(learned.encode("hidden")) == 6


@pytest.mark.parametrize(
    "change",
    [
        {"normalizer": {"type": "NFC"}},
        {
            "pre_tokenizer": {
                "type": "ByteLevel",
                "add_prefix_space": True,
                "trim_offsets": True,
                "use_regex": True,
            }
        },
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": {"type": "Sequence", "pretokenizers": []}},
    ],
)
def test_no_byte_table_where_text_is_altered(bpe, change):
    spec = json.loads(open(bpe, encoding="utf-8").read()) | change
    assert JsonTokenizer(json.dumps(spec), name="altered").token_bytes is None


def test_split_then_byte_level_is_exact(bpe, texts):
    split = {
        "type": "Split",
        "pattern": {"Regex": r"\p{N}{1,3}|\s+"},
        "behavior": "Isolated",
        "invert": False,
    }
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    spec = json.loads(open(bpe, encoding="utf-8").read())
    spec["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, level]}
    tokenizer = JsonTokenizer(json.dumps(spec), name="split")
    for text in texts:
        assert tokenizer.token_bytes[tokenizer.encode(text)].sum() == len(text.encode())


def test_bad_tokenizers(bpe, tmp_path, jsonl):
    with pytest.raises(UserError, match='tokenizer = .*use "bytes" or the path'):
        load_tokenizer("gpt9")
    broken = tmp_path / "tokenizer.json"
    broken.write_text("{}")
    (tmp_path / "text.txt").write_text("no tokenizer")
    with pytest.raises(UserError, match="tokenizer = '.*/text.txt': not a tokenizer.json"):
        load_tokenizer(str(tmp_path / "text.txt"))
    with pytest.raises(UserError, match="not a tokenizer.json"):
        load_tokenizer(str(broken))
    spec = open(bpe, encoding="utf-8").read().replace("<|endoftext|>", "<|unheard|>")
    with pytest.raises(UserError, match="end-of-text token"):
        JsonTokenizer(spec, name="endless")
    with pytest.raises(UserError, match="at least 257"):
        train_bpe([jsonl], 256, tmp_path / "small.json")


def test_training_leaves_the_files_beside_it_alone(jsonl, tmp_path):
    (tmp_path / "t.json.partial").write_text("mine")
    train_bpe([jsonl], 300, tmp_path / "t.json")
    assert (tmp_path / "t.json.partial").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["t.json", "t.json.partial"]


def test_another_file_is_not_replaced_by_a_tokenizer(jsonl, tmp_path):
    (tmp_path / "notes.json").write_text('{"important": 1}')
    with pytest.raises(UserError, match="notes.json.*is there already, and no tokenizer"):
        train_bpe([jsonl], 300, tmp_path / "notes.json")
    assert (tmp_path / "notes.json").read_text() == '{"important": 1}'
    first = train_bpe([jsonl], 300, tmp_path / "t.json")
    assert train_bpe([jsonl], 301, tmp_path / "t.json").vocab_size == first.vocab_size + 1


def test_where_a_tokenizer_cannot_be_written_shows_before_anything_is_read(jsonl, tmp_path):
    read = []
    (tmp_path / "empty.txt").touch()
    below_a_file = tmp_path / "empty.txt" / "t.json"
    for out, message in ((below_a_file, "out = .*parents is a file"), (tmp_path, "out = .*is a folder")):
        with pytest.raises(UserError, match=message):
            train_bpe([jsonl], 300, out, progress=read.append)
    with pytest.raises(UserError, match="no text"):
        train_bpe([str(tmp_path / "empty.txt")], 300, tmp_path / "t.json")
    assert not read and [path.name for path in tmp_path.iterdir()] == ["empty.txt"]
    assert train_bpe([jsonl], 300, tmp_path / "made" / "t.json").vocab_size <= 300
