"""Training from an object store without a copy of it: reads of the rows' own bytes, a bounded number of them ahead.

`memory://` stands for `gs://` and `s3://`, and in place of the hub's file system stands one with the same layout.
"""

import threading
import time
import uuid
from pathlib import Path

import chex
import fsspec
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from nagjax.data import DataConfig, batches, open_dataset, prepare
from nagjax.data.storage import RemotePath, storage_path
from nagjax.errors import UserError
from tests.data.test_batches import take


class Reads:
    """Records reads from a folder in memory: (name, start, stop), or (name, None, None) for a whole file.

    Of this folder alone: readers of the test before may still be at work on theirs.
    """

    def __init__(self, monkeypatch, folder):
        self.seen, self.at_once, self.most, self.wait = [], 0, 0, 0.0
        lock, cat, opened = threading.Lock(), MemoryFileSystem.cat_file, MemoryFileSystem._open

        def cat_file(fs, path, start=None, end=None, **options):
            if folder not in path:
                return cat(fs, path, start, end, **options)
            with lock:
                self.seen.append((path.rpartition("/")[2], start, end))
                self.at_once += 1
                self.most = max(self.most, self.at_once)
            time.sleep(self.wait)
            with lock:
                self.at_once -= 1
            return cat(fs, path, start, end, **options)

        def _open(fs, path, mode="rb", **options):
            if mode == "rb" and folder in path:
                self.seen.append((path.rpartition("/")[2], None, None))
            return opened(fs, path, mode, **options)

        monkeypatch.setattr(MemoryFileSystem, "cat_file", cat_file)
        monkeypatch.setattr(MemoryFileSystem, "_open", _open)

    def of(self, ending):
        return [read for read in self.seen if read[0].endswith(ending)]


@pytest.fixture
def folder():
    """A name of this test's own."""
    return f"corpus-{uuid.uuid4().hex}"


@pytest.fixture
def reads(monkeypatch, folder):
    return Reads(monkeypatch, folder)


@pytest.fixture
def stored(corpus, folder):
    """The corpus in memory, under its URL."""
    fs = fsspec.filesystem("memory")
    for path in Path(corpus).iterdir():
        fs.pipe_file(f"/bucket/{folder}/{path.name}", path.read_bytes())
    yield f"memory://bucket/{folder}"
    fs.rm("/bucket", recursive=True)


@pytest.mark.parametrize("rows", ["packed", "document"])
def test_only_the_rows_that_are_taken_are_read(corpus, stored, reads, rows):
    here, there = (open_dataset(DataConfig(path, rows=rows)) for path in (corpus, stored))
    assert {name for name, *_ in reads.seen} == {"manifest.json"}, "to open it takes its manifest"
    assert (there.token_count, there.document_count, there.byte_count) == (
        here.token_count,
        here.document_count,
        here.byte_count,
    )
    assert not reads.of(".tokens") and not reads.of(".documents")
    streams = [batches(dataset, batch=2, context=16) for dataset in (here, there)]
    chex.assert_trees_all_equal(*(take(stream, 6) for stream in streams))
    del streams
    ranges = reads.of(".tokens")
    assert ranges and all(start is not None and 0 < stop - start <= 2 * 17 for _, start, stop in ranges)
    indexes = [name for name, *_ in reads.of(".documents")]
    assert len(indexes) == len(set(indexes)), "each index once"


def test_as_many_reads_at_once_as_are_ahead_and_no_more(stored, reads):
    dataset = open_dataset(DataConfig(stored))
    stream = batches(dataset, batch=1, context=64)
    next(stream)
    reads.seen.clear()
    reads.wait = 0.02
    took = 40
    take(stream, took)
    time.sleep(0.5)
    assert 1 < reads.most <= 16
    assert len(reads.of(".tokens")) <= 2 * (took + 2 * 16), "a row may lie in two shards"


def test_a_pass_and_a_mixture(corpus, stored):
    for repeat in (True, False):
        mixes = [DataConfig(mix=(f"{path}=1@0,2@1", "stdlib=0.5")) for path in (corpus, stored)]
        streams = [batches(open_dataset(mix), batch=4, context=32, repeat=repeat, steps=9) for mix in mixes]
        chex.assert_trees_all_equal(*(take(stream, 9) for stream in streams))


class Hub(MemoryFileSystem):
    """Data sets of a hub, in memory."""

    protocol = "hf"
    store, pseudo_dirs = {}, [""]


def test_a_prepared_corpus_on_the_hub(corpus, folder, reads, monkeypatch):
    filesystem = fsspec.filesystem
    monkeypatch.setattr(fsspec, "filesystem", lambda name, **options: Hub() if name == "hf" else filesystem(name))
    for path in Path(corpus).iterdir():
        Hub().pipe_file(f"/datasets/owner/name/{folder}/{path.name}", path.read_bytes())
    here, there = (open_dataset(DataConfig(path)) for path in (corpus, f"hub:owner/name/{folder}"))
    chex.assert_trees_all_equal(*(take(batches(one, batch=4, context=32), 5) for one in (here, there)))
    assert here.content == there.content
    ranges = reads.of(".tokens")
    assert ranges and all(start is not None for _, start, _ in ranges)
    with pytest.raises(UserError, match="datasets/owner/other.*does not exist"):
        open_dataset(DataConfig("hub:owner/other"))
    with pytest.raises(UserError, match="hub:OWNER/NAME"):
        open_dataset(DataConfig("hub:name"))
    with pytest.raises(UserError, match="out = 'hub:owner/new'.*upload"):
        prepare([str(Path(corpus) / "in.txt")], "hub:owner/new")


def test_a_hub_that_cannot_be_reached(monkeypatch):
    class Gone(Hub):
        def info(self, path, **options):
            raise RuntimeError("no route")

    monkeypatch.setattr(fsspec, "filesystem", lambda name, **options: Gone())
    with pytest.raises(UserError, match="datasets/owner/name.*RuntimeError: no route.*network"):
        open_dataset(DataConfig("hub:owner/name"))


def test_urls_of_the_hub():
    path = storage_path("hub:owner/name@v1/folder/")
    assert path == RemotePath("hf", "datasets/owner/name@v1/folder") and path.name == "folder"


def test_what_is_not_there(stored):
    fs = fsspec.filesystem("memory")
    name = next(path for path in fs.ls(stored.removeprefix("memory:/"), detail=False) if path.endswith(".tokens"))
    kept = fs.cat_file(name)
    fs.pipe_file(name, kept[:-2])
    with pytest.raises(UserError, match=f"{name.rpartition('/')[2]}.*instead of"):
        open_dataset(DataConfig(stored))
    fs.rm(name)
    with pytest.raises(UserError, match=f"{name.rpartition('/')[2]}.*is missing"):
        open_dataset(DataConfig(stored))
