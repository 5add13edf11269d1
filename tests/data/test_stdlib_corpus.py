import multiprocessing
import os
import shutil
import tempfile
import time
from pathlib import Path

import chex
import pytest

from nagjax.data import ByteTokenizer, DataConfig, load_tokenizer, open_dataset, stdlib, stdlib_documents, store
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
    assert dataset.stream.exact and sorted(os.listdir(tmp_path)) == ["a file", "nagjax"]


def few_documents():
    return [f"print({number})\n" for number in range(200)]


@pytest.fixture
def few(tmp_path, monkeypatch):
    """A cold cache for a small library; returns what opens a split of it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(stdlib, "stdlib_documents", few_documents)
    return lambda split="train": stdlib.open_stdlib(split, ByteTokenizer())[0]


@pytest.mark.parametrize("when", ["read_manifest", "open_stream", "size_of", "verify_small", "_hash_of"])
def test_a_cache_that_vanishes_while_it_is_opened(few, tmp_path, monkeypatch, when):
    first = few()
    want = first.read(0, len(first))
    module = stdlib if hasattr(stdlib, when) else store
    real = getattr(module, when)

    def vanishing(*args):
        shutil.rmtree(tmp_path / "nagjax", ignore_errors=True)
        return real(*args)

    monkeypatch.setattr(module, when, vanishing)
    store._hash_of.cache_clear() if when != "_hash_of" else real.cache_clear()
    chex.assert_trees_all_equal(few().read(0, len(first)), want)


def wait_for(path):
    end = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < end, f"no {path.name}"
        time.sleep(0.01)


def fill_with_pauses(folder):
    """In a process of its own: fills the cache, and waits before and after it removes anything."""
    rmtree = shutil.rmtree

    def pausing(path, **options):
        (folder / "before").touch()
        wait_for(folder / "remove")
        rmtree(path, **options)
        (folder / "after").touch()
        wait_for(folder / "end")

    shutil.rmtree = pausing
    stdlib.stdlib_documents = few_documents
    stream = stdlib.open_stdlib("train", ByteTokenizer())[0]
    assert len(stream.read(0, len(stream))) == len(stream)


def test_two_processes_that_find_no_cache(few, tmp_path):
    """The one that is later removes nothing that the other has opened, and is about to map."""
    other = multiprocessing.get_context("spawn").Process(target=fill_with_pauses, args=(tmp_path,))
    other.start()
    try:
        wait_for(tmp_path / "before")
        stream = few()
        (tmp_path / "remove").touch()
        wait_for(tmp_path / "after")
        assert stream.read(0, len(stream)).any()
    finally:
        (tmp_path / "remove").touch()
        (tmp_path / "end").touch()
        other.join(60)
    assert other.exitcode == 0
    assert len(list(cache_root().iterdir())) == 1, "something was left beside the cache"


def test_a_damaged_cache_is_mended_under_its_name(few, monkeypatch):
    """Another process may have opened what is whole of it."""
    few()
    (folder,) = cache_root().iterdir()
    shard, rmtree, rename = folder / "validation-00000.tokens", shutil.rmtree, Path.rename
    shard.write_bytes(shard.read_bytes()[:-2])

    def there(real):
        def checked(path, *args, **options):
            assert Path(path) != folder
            found = real(path, *args, **options)
            assert (folder / "train-00000.tokens").exists()
            return found

        return checked

    monkeypatch.setattr(shutil, "rmtree", there(rmtree))
    monkeypatch.setattr(Path, "rename", there(rename))
    few("validation")
    assert shard.stat().st_size == 2 * len(few("validation"))


def test_the_temporary_cache_of_another_user_is_left_alone(few, tmp_path, monkeypatch):
    def homeless():
        raise RuntimeError

    other = os.getuid() + 1
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    monkeypatch.setattr(os, "getuid", lambda: other)
    (tmp_path / f"nagjax-{other}").mkdir()
    assert len(few("train")) > len(few("validation")) > 0
    assert [*tmp_path.rglob("*")] == [tmp_path / f"nagjax-{other}"]


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
