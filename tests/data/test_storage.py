"""Corpora behind URLs, through Arrow's file systems; `file://` uses the same code as `gs://` and `s3://`."""

import json
import pickle
from pathlib import Path

import fsspec
import numpy as np
import pyarrow.fs
import pytest

from nagjax.cli import main
from nagjax.data import DataConfig, batches, beam, open_dataset, prepare, storage, verify
from nagjax.data.storage import RemotePath, storage_path
from nagjax.errors import UserError
from tests.data.test_beam import content, in_this_process


def test_batches_are_those_of_the_mapped_files(corpus):
    url = f"file://{corpus}"
    verify(url)
    for repeat in (True, False):
        pair = [
            batches(open_dataset(DataConfig(path=path)), batch=4, context=32, repeat=repeat) for path in (corpus, url)
        ]
        for _ in range(5):
            here, there = (next(stream) for stream in pair)
            for name in here:
                np.testing.assert_array_equal(here[name], there[name])
    mapped, remote = (open_dataset(DataConfig(path=path)) for path in (corpus, url))
    np.testing.assert_array_equal(mapped.bytes_per_token(), remote.bytes_per_token())
    assert mapped.byte_count == remote.byte_count


@pytest.mark.parametrize("runner", ["local", "beam"])
def test_preparing_from_and_to_a_url(jsonl, corpus, tmp_path, monkeypatch, runner):
    in_this_process(monkeypatch)
    make = {"local": prepare, "beam": beam.prepare_on_beam}[runner]
    make([f"file://{Path(jsonl).parent}"], f"file://{tmp_path}/out", validation=0.2, shard_tokens=7000)
    found = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir() if p.is_file()}
    assert json.loads(found.pop("manifest.json"))["source"]["inputs"][0][0] == f"file://{jsonl}"
    assert found == {name: data for name, data in content(corpus).items() if name != "manifest.json"}
    verify(f"file://{tmp_path}/out")


def test_cut_and_missing_shards_are_named(corpus, tmp_path):
    for path in Path(corpus).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    shard = tmp_path / "train-00000.tokens"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(UserError, match="train-00000.tokens.*instead of"):
        open_dataset(DataConfig(path=f"file://{tmp_path}"))
    shard.unlink()
    with pytest.raises(UserError, match="train-00000.tokens.*missing"):
        open_dataset(DataConfig(path=f"file://{tmp_path}"))
    with pytest.raises(UserError, match="not a corpus folder|does not exist"):
        open_dataset(DataConfig(path=f"file://{tmp_path}/nowhere"))


NAMES = ["part 1", "part%201", "100%", "a#b", "a?b=c", "a+b&c", "[é 日本]"]


@pytest.mark.parametrize("name", NAMES)
def test_any_name_is_taken_as_it_is(jsonl, corpus, tmp_path, name):
    source = tmp_path / name
    source.mkdir()
    (source / f"{name}.jsonl").write_bytes(Path(jsonl).read_bytes())
    prepare([f"file://{source}"], f"file://{source}/out", validation=0.2, shard_tokens=7000)
    here, there = (open_dataset(DataConfig(path)) for path in (corpus, f"file://{source}/out"))
    assert here.content == there.content == verify(source / "out").content
    np.testing.assert_array_equal(here.stream.read(0, 99), there.stream.read(0, 99))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_arrow_is_asked_for_the_name_that_is_meant(monkeypatch, scheme, name):
    """Arrow asks the network for the region of a bucket, but where the URL tells it."""
    asked, real = [], pyarrow.fs.FileSystem

    class Recording:
        @staticmethod
        def from_uri(uri):
            asked.append(real.from_uri(uri + ("?region=us-east-1" if scheme == "s3" else ""))[1])
            return None, asked[-1]

    monkeypatch.setattr(pyarrow.fs, "FileSystem", Recording)
    _ = storage_path(f"{scheme}://bucket/{name}/in.txt")._store
    assert asked == [f"bucket/{name}/in.txt"]


@pytest.mark.parametrize("url", ["file://folder/in.txt", "gs:///in.txt", "s3:///in.txt", "gs://bucket/\udcff"])
def test_urls_that_name_nothing(url):
    with pytest.raises(UserError, match="path = .*file:///"):
        storage_path(url).exists()


def test_urls():
    path = storage_path("gs://bucket/folder/")
    assert path == RemotePath("gs", "bucket/folder") and str(path / "a.jsonl.gz") == "gs://bucket/folder/a.jsonl.gz"
    assert pickle.loads(pickle.dumps(path)) == path and (path / "a.jsonl.gz").suffixes == [".jsonl", ".gz"]
    assert isinstance(storage_path("plain/path"), Path)
    for bad in ("http://host/x", "gs://"):
        with pytest.raises(UserError, match="gs://, s3://, file://"):
            storage_path(bad)


def test_remote_inputs_that_change_after_a_stop_are_refused(tmp_path):
    name, fs = f"/{tmp_path.name}/in.jsonl", fsspec.filesystem("memory")

    def stop(documents, tokens):
        if documents == 300:
            raise KeyboardInterrupt

    def request(**more):
        return prepare(f"memory:/{name}", tmp_path / "out", shard_tokens=900, validation=0.0, **more)

    fs.pipe(name, b"".join(b'{"text": "old%06d"}\n' % i for i in range(400)))
    with pytest.raises(KeyboardInterrupt):
        request(progress=stop)
    fs.pipe(name, b"".join(b'{"text": "new%06d"}\n' % i for i in range(400)))
    with pytest.raises(UserError, match="in.jsonl in inputs has changed"):
        request()


@pytest.mark.parametrize("fault", ["raises", "short"])
def test_a_read_that_fails_is_tried_again(monkeypatch, fault):
    """A training over weeks reads millions of times. A short read would fill a row with one token."""
    path, told = RemotePath("memory", "numbers"), []
    with path.open("wb") as file:
        file.write(np.arange(6, dtype=np.int32).tobytes())
    read = RemotePath.read_range

    def unsteady(self, start, stop):
        told.append(start)
        if len(told) % 5:
            if fault == "raises":
                raise TimeoutError("no answer")
            stop -= 1
        return read(self, start, stop)

    monkeypatch.setattr(RemotePath, "read_range", unsteady)
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    np.testing.assert_array_equal(storage.RemoteArray(path, "int32")[2:5], [2, 3, 4])
    assert told == [8] * 5
    monkeypatch.setattr(storage, "TRIES", 4)
    with pytest.raises(UserError, match="data.path = 'memory://numbers': cannot be reached"):
        storage.RemoteArray(path, "int32")[2:5]


@pytest.mark.parametrize("field", ["inputs", "held_out", "out"])
def test_an_unknown_store_is_named_by_its_argument(jsonl, tmp_path, field, capsys):
    given = {"inputs": [jsonl], "held_out": [], "out": tmp_path / "out"}
    given[field] = "ftp://x/y.txt" if field == "out" else ["ftp://x/y.txt"]
    with pytest.raises(UserError, match=f"^{field} = 'ftp://x/y.txt': use a path, or a URL"):
        prepare(**given)
    assert main(["data", "prepare", jsonl, "--out", "ftp://x/y.txt"]) == 2
    assert "out = 'ftp://x/y.txt'" in capsys.readouterr().err
