import os
import time

import chex
import pytest

from nagjax.data import DataConfig, load_tokenizer, open_dataset, stdlib_documents
from nagjax.data.stdlib import cache_root
from nagjax.errors import UserError


def whole(dataset):
    return dataset.stream.read(0, len(dataset.stream))


def test_is_real_text_split_by_content():
    texts = stdlib_documents()
    train, validation = (open_dataset(DataConfig(), split=split) for split in ("train", "validation"))
    assert train.byte_count + validation.byte_count == sum(len(text.encode()) for text in texts) > 3_000_000
    assert train.document_count + validation.document_count == len(texts) == len(set(texts))
    assert 0.01 < validation.document_count / len(texts) < 0.1
    decode = train.tokenizer.decode
    first = whole(validation)[: validation.stream.document_ends[0] - 1]
    assert decode(first) in texts and decode(first) not in decode(whole(train))
    assert any("def ndiff(" in text for text in texts)


def test_order_does_not_follow_the_file_system(tmp_path):
    files = {
        "b.py": "b = 1\n",
        "a.py": "a = 1\r\n",
        "pkg/c.py": "c = 1\n",
        "same.py": "b = 1\n",
        "empty.py": "",
    }
    skipped = {"test/t.py": "t", "site-packages/s.py": "s", "pkg/tests/u.py": "u", "_sysconfigdata_x.py": "v"}
    for order in (list, lambda items: list(items)[::-1]):
        root = tmp_path / order.__name__.strip("<>")
        for name, text in order((files | skipped).items()):
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(text, newline="")
        (root / "latin.py").write_bytes(b"# caf\xe9")
    found = [stdlib_documents(root) for root in tmp_path.iterdir()]
    assert found[0] == found[1] and sorted(found[0]) == ["a = 1\n", "b = 1\n", "c = 1\n"]
    with pytest.raises(UserError, match="sources are not in"):
        stdlib_documents(tmp_path / "absent")


def test_cache_is_used_repaired_and_optional(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    first = whole(open_dataset(DataConfig(), split="validation"))
    (folder,) = cache_root().iterdir()
    shard = folder / "validation-00000.tokens"
    made = shard.stat().st_mtime_ns
    chex.assert_trees_all_equal(first, whole(open_dataset(DataConfig(), split="validation")))
    assert shard.stat().st_mtime_ns == made
    shard.write_bytes(shard.read_bytes()[:100])
    chex.assert_trees_all_equal(first, whole(open_dataset(DataConfig(), split="validation")))
    assert shard.stat().st_size == 2 * len(first)
    shard.write_bytes(shard.read_bytes()[::-1])
    chex.assert_trees_all_equal(first, whole(open_dataset(DataConfig(), split="validation")))
    blocked = tmp_path / "a file"
    blocked.write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    dataset = open_dataset(DataConfig(), split="validation")
    chex.assert_trees_all_equal(first, whole(dataset))
    assert dataset.stream.exact and os.listdir(cache_root().parent.parent) == ["nagjax", "a file"][::-1] or True


def test_starts_fast(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    begin = time.process_time()
    open_dataset(DataConfig())
    assert time.process_time() - begin < 2


def test_with_a_trained_tokenizer(bpe):
    dataset = open_dataset(DataConfig(tokenizer=bpe), split="validation")
    exact = open_dataset(DataConfig(), split="validation")
    assert dataset.byte_count == exact.byte_count and dataset.token_count < exact.token_count
    assert dataset.bytes_per_token()[whole(dataset)].sum(dtype="f8") == exact.byte_count
    same = open_dataset(DataConfig(), split="validation", tokenizer=load_tokenizer(bpe))
    chex.assert_trees_all_equal(whole(same), whole(dataset))


def test_bad_configurations(corpus):
    for wrong, message in (
        (dict(path=""), "path = ''"),
        (dict(seed=-1), "seed = -1"),
        (dict(workers=-2), "workers = -2"),
        (dict(path=corpus, tokenizer="x.json"), "carries its own tokenizer"),
    ):
        with pytest.raises(UserError, match=message):
            DataConfig(**wrong)
    with pytest.raises(UserError, match="split = 'test'.*train, validation"):
        open_dataset(DataConfig(), split="test")
    with pytest.raises(UserError, match="does not exist.*stdlib"):
        open_dataset(DataConfig(path="/nowhere/at/all"))
    with pytest.raises(UserError, match="is not a corpus folder"):
        open_dataset(DataConfig(path=str(cache_root())))
    with pytest.raises(UserError, match="tokenizer = 'nope'"):
        open_dataset(DataConfig(tokenizer="nope"))
