import errno
import json
import os
import stat
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest

from nagjax.cli import main
from nagjax.data import DataConfig, load_tokenizer, open_dataset, preparation, prepare, read_manifest, verify
from nagjax.data.beam import prepare_on_beam
from nagjax.data.hub import HubDataset
from nagjax.errors import UserError
from tests.data.test_beam import in_this_process


def raw_documents(folder, split):
    """The token lists of a split, read straight from the files the manifest names."""
    manifest = json.loads((Path(folder) / "manifest.json").read_text())
    for shard in manifest["splits"][split]["shards"]:
        tokens = np.fromfile(Path(folder) / shard["tokens"]["name"], manifest["dtype"]).tolist()
        start = 0
        for end, size in np.fromfile(Path(folder) / shard["documents"]["name"], "<i8").reshape(-1, 2):
            yield tokens[start:end], int(size)
            start = int(end)
        assert start == len(tokens)


def content(folder):
    return {p.name: p.read_bytes() for p in Path(folder).iterdir()}


@pytest.mark.parametrize("kind", ["corpus", "bpe_corpus"])
def test_files_hold_every_document_once(kind, request, texts):
    folder = request.getfixturevalue(kind)
    tokenizer = open_dataset(DataConfig(path=folder)).tokenizer
    found = {"train": [], "validation": []}
    for split, documents in found.items():
        for ids, size in raw_documents(folder, split):
            assert ids[-1] == tokenizer.end_of_text and tokenizer.end_of_text not in ids[:-1]
            documents.append(tokenizer.decode(ids[:-1]))
            assert size == len(documents[-1].encode()) == tokenizer.token_bytes[ids].sum()
    threshold = 0.2 * 2**64
    held_out = [t for t in texts if int(sha256(t.encode()).hexdigest()[:16], 16) < threshold]
    assert held_out and found["validation"] == held_out
    assert found["train"] == [t for t in texts if t not in held_out]


def test_manifest_describes_the_folder(corpus, texts):
    manifest = verify(corpus)
    assert len(manifest.splits["train"]) > 2
    totals = {what: sum(manifest.total(s, what) for s in manifest.splits) for what in ("byte_count", "document_count")}
    assert totals == {"byte_count": sum(len(t.encode()) for t in texts), "document_count": len(texts)}
    names = {f.name for shards in manifest.splits.values() for s in shards for f in (s.tokens, s.documents)}
    assert set(os.listdir(corpus)) == names | {"manifest.json"}
    written = json.loads((Path(corpus) / "manifest.json").read_text())
    assert written["format"] == 1 and written["dtype"] == "<u2"
    assert written["splits"]["train"]["token_count"] == open_dataset(DataConfig(path=corpus)).token_count


def test_large_vocabularies_take_four_bytes(bpe, jsonl, tmp_path):
    spec = json.loads(Path(bpe).read_text(encoding="utf-8"))
    spec["model"]["vocab"]["zzzzz"] = 70_000
    wide = tmp_path / "wide.json"
    wide.write_text(json.dumps(spec))
    assert load_tokenizer(str(wide)).vocab_size == 70_001
    manifest = prepare([jsonl], tmp_path / "out", tokenizer=str(wide))
    assert manifest.dtype == "<u4"
    assert open_dataset(DataConfig(path=str(tmp_path / "out"))).tokenizer.vocab_size == 70_001


def test_inexact_tokenizers_get_the_mean(bpe, jsonl, tmp_path):
    spec = json.loads(Path(bpe).read_text(encoding="utf-8")) | {"normalizer": {"type": "Lowercase"}}
    lower = tmp_path / "lower.json"
    lower.write_text(json.dumps(spec))
    prepare([jsonl], tmp_path / "out", tokenizer=str(lower), validation=0.2)
    dataset = open_dataset(DataConfig(path=str(tmp_path / "out")), split="validation")
    assert dataset.tokenizer.token_bytes is None and not dataset.stream.exact
    table = dataset.bytes_per_token()
    assert table[dataset.tokenizer.end_of_text] == 0
    total = table[dataset.stream.read(0, len(dataset.stream))].sum(dtype=np.float64)
    np.testing.assert_allclose(total, dataset.byte_count, rtol=1e-6)


def test_same_request_same_bytes_and_no_work(corpus, jsonl, tmp_path):
    prepare([jsonl], tmp_path / "again", validation=0.2, shard_tokens=7000)
    assert content(tmp_path / "again") == content(corpus)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "again").iterdir()}
    prepare([jsonl], tmp_path / "again", validation=0.2, shard_tokens=7000)
    assert before == {p: p.stat().st_mtime_ns for p in (tmp_path / "again").iterdir()}
    with pytest.raises(UserError, match="out = .*another corpus"):
        prepare([jsonl], tmp_path / "again", validation=0.3, shard_tokens=7000)


@pytest.mark.parametrize("failing_write", [1, 2, 5, 8])
def test_full_disk_loses_nothing_and_the_next_run_goes_on(corpus, jsonl, tmp_path, monkeypatch, failing_write):
    out, writes, told, fsync = tmp_path / "out", [], [], os.fsync

    def full(descriptor):
        writes.extend([descriptor] * stat.S_ISREG(os.fstat(descriptor).st_mode))
        if len(writes) == failing_write:
            raise OSError(errno.ENOSPC, "No space left on device")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    arguments = dict(validation=0.2, shard_tokens=7000)
    with pytest.raises(UserError, match="disk is full.*same command again"):
        prepare([jsonl], out, **arguments)
    assert not list(out.glob(".*")), "a part of a file was left"
    if failing_write > 5:
        with pytest.raises(UserError, match="not finished"):
            open_dataset(DataConfig(path=str(out)))
        with pytest.raises(UserError, match="unfinished corpus of another request"):
            prepare([jsonl], out, validation=0.1, shard_tokens=7000)
    finished = json.loads((out / "progress.json").read_text())["rounds"] if failing_write > 5 else 0
    writes.clear()
    failing_write = -1
    prepare([jsonl], out, **arguments, progress=lambda *numbers: told.append(numbers))
    assert content(out) == content(corpus)
    assert told[-1][1] == sum(shard.token_count for own in read_manifest(corpus).splits.values() for shard in own)
    total = len(list(Path(corpus).glob("*"))) + len(read_manifest(corpus).splits["train"])
    assert finished == 0 or len(writes) <= total - 3 * finished


def test_killed_parts_are_never_read(corpus, jsonl, tmp_path):
    out = tmp_path / "out"
    out.mkdir()
    (out / ".train-00000.tokens.partial").write_bytes(b"half")
    (out / "train-00000.tokens").write_bytes(b"a whole shard that no record vouches for")
    prepare([jsonl], out, validation=0.2, shard_tokens=7000)
    assert content(out) == content(corpus)


def test_several_writers_of_one_corpus(corpus, jsonl, tmp_path):
    """From Python no lock is taken: each writes files of its own and the last one's stay, equal to all others'."""

    def make():
        return prepare([jsonl], tmp_path / "out", validation=0.2, shard_tokens=7000)

    with ThreadPoolExecutor(3) as pool:
        made = [one.result() for one in [pool.submit(make) for _ in range(3)]]
    assert made[0] == made[1] == made[2] and content(tmp_path / "out") == content(corpus)


def test_a_tokenizer_of_another_is_not_replaced(bpe, jsonl, tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    before = content(tmp_path)
    with pytest.raises(UserError, match=r"out = .*tokenizer.json is another one"):
        prepare([jsonl], tmp_path, tokenizer=bpe)
    assert content(tmp_path) == before
    (tmp_path / "tokenizer.json").write_bytes(Path(bpe).read_bytes())
    prepare([jsonl], tmp_path, tokenizer=str(tmp_path / "tokenizer.json"))


def test_what_a_kill_after_the_last_write_leaves_is_removed_by_the_same_command(corpus, jsonl, tmp_path):
    arguments = ["data", "prepare", str(jsonl), "--out", str(tmp_path / "out"), "--validation", "0.2"]
    assert main(arguments) == 0
    before = content(tmp_path / "out")
    for name in ("progress.json", "lock.json", ".train-00000.tokens.partial"):
        (tmp_path / "out" / name).write_text("{")
    assert main(arguments) == 0 and content(tmp_path / "out") == before


@pytest.fixture
def copied(corpus, tmp_path):
    for path in Path(corpus).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def test_cut_missing_and_changed_shards_are_named(copied):
    shard = copied / "train-00001.tokens"
    data = shard.read_bytes()
    shard.write_bytes(data[:-2])
    with pytest.raises(UserError, match=rf"train-00001.tokens.*{len(data) - 2} bytes instead of {len(data)}.*prepare"):
        open_dataset(DataConfig(path=str(copied)))
    shard.write_bytes(b"\x01" + data[1:])
    for read in (lambda: open_dataset(DataConfig(path=str(copied))), lambda: verify(copied)):
        with pytest.raises(UserError, match="train-00001.tokens.*content changed"):
            read()
    shard.unlink()
    with pytest.raises(UserError, match="train-00001.tokens.*missing"):
        open_dataset(DataConfig(path=str(copied)))


def cut(path):
    path.write_bytes(path.read_bytes()[:-2])


@pytest.mark.parametrize("runner", ["local", "beam"])
@pytest.mark.parametrize("prefix", ["", "file://"])
@pytest.mark.parametrize(
    "name, damage",
    [
        ("train-00001.tokens", Path.unlink),
        ("train-00001.documents", Path.unlink),
        ("validation-00000.tokens", cut),
        ("validation-00000.documents", cut),
        ("tokenizer.json", Path.unlink),
        ("tokenizer.json", cut),
        ("tokenizer.json", lambda path: path.write_text(path.read_text().replace('"dropout": null', '"dropout": 0.1'))),
        ("manifest.json", cut),
        ("manifest.json", lambda path: path.write_text(path.read_text().replace('"exact": true', '"exact": "true"'))),
        ("manifest.json", lambda path: path.write_text(path.read_text().replace('"format": 1', '"format": 99'))),
    ],
)
def test_a_finished_corpus_that_is_no_longer_whole(
    bpe_corpus, jsonl, bpe, tmp_path, monkeypatch, name, damage, prefix, runner
):
    """The same command names the file, and says what else to do than the same command again."""
    in_this_process(monkeypatch)
    for path in Path(bpe_corpus).iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    make = {"local": prepare, "beam": prepare_on_beam}[runner]
    arguments = [jsonl], f"{prefix}{tmp_path}"
    given = dict(tokenizer=bpe, validation=0.2, shard_tokens=3000)
    made = make(*arguments, **given)
    assert made == read_manifest(bpe_corpus)
    damage(tmp_path / name)
    with pytest.raises(UserError, match="^out = .*delete the folder and prepare") as error:
        make(*arguments, **given)
    assert name in str(error.value) or "format" in str(error.value)


@pytest.mark.parametrize("prefix", ["", "file://"])
@pytest.mark.parametrize("damage", [Path.unlink, cut])
def test_a_recorded_shard_of_an_unfinished_corpus_is_gone(jsonl, tmp_path, monkeypatch, damage, prefix):
    """Before anything is read again."""
    rounds = []

    def stopping(*args):
        rounds.append(write_shard(*args))
        if len(rounds) == 4:
            raise KeyboardInterrupt
        return rounds[-1]

    write_shard = preparation.write_shard
    monkeypatch.setattr(preparation, "write_shard", stopping)
    arguments = [jsonl], f"{prefix}{tmp_path}/out"
    with pytest.raises(KeyboardInterrupt):
        prepare(*arguments, validation=0.2, shard_tokens=3000)
    damage(tmp_path / "out" / "train-00000.tokens")
    monkeypatch.setattr(preparation, "split_documents", None)
    with pytest.raises(UserError, match="^out = .*train-00000.tokens.*delete the folder"):
        prepare(*arguments, validation=0.2, shard_tokens=3000)


@pytest.mark.parametrize("make", [prepare, prepare_on_beam])
def test_no_manifest_names_a_shard_that_is_gone(jsonl, tmp_path, monkeypatch, make):
    in_this_process(monkeypatch)
    module = sys.modules[make.__module__]

    def late(request, splits):
        (tmp_path / "train-00001.documents").unlink()
        return finish(request, splits)

    finish = module.finish
    monkeypatch.setattr(module, "finish", late)
    with pytest.raises(UserError, match="train-00001.documents.*missing.*delete the folder"):
        make([jsonl], tmp_path, validation=0.2, shard_tokens=3000)
    assert not (tmp_path / "manifest.json").exists()


@pytest.fixture
def hub(monkeypatch):
    """A data set `hub:x` of two documents."""
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    monkeypatch.setattr(HubDataset, "rows", lambda self: iter([{"text": "of the hub"}, {"text": "also"}]))


@pytest.mark.parametrize("which", ["inputs", "held_out"])
def test_the_order_of_inputs_is_part_of_the_request(hub, jsonl, tmp_path, which):
    """A run that was stopped goes on behind the documents it has read, in this order."""
    orders = [["hub:x", jsonl], [jsonl, "hub:x"]]
    others = {"inputs": ["hub:x"], "held_out": []}
    for number, order in enumerate(orders):
        made = prepare(out=tmp_path / str(number), validation=0.0, **others | {which: order})
        assert [entry[0] for entry in made.source[which]] == order
        assert prepare(out=tmp_path / str(number), validation=0.0, **others | {which: order}) == made
    for number, order in enumerate(reversed(orders)):
        with pytest.raises(UserError, match=f"another corpus already .*{which}"):
            prepare(out=tmp_path / str(number), validation=0.0, **others | {which: order})


@pytest.mark.parametrize("name", ["manifest.json", "progress.json"])
def test_a_file_of_something_else_with_such_a_name_is_left_alone(jsonl, tmp_path, name):
    (tmp_path / name).write_text('{"name": "my web app"}')
    with pytest.raises(UserError, match=f"out = .*its {name} is not that of a corpus: choose another folder"):
        prepare([jsonl], tmp_path)
    assert (tmp_path / name).read_text() == '{"name": "my web app"}'


@pytest.mark.parametrize("state, key", [("manifest.json", "source"), ("progress.json", "request")])
def test_a_record_of_inputs_as_older_versions_had_it(hub, jsonl, tmp_path, monkeypatch, state, key):
    """They noted data sets of the hub first, in whatever order all were read."""
    arguments = [jsonl, "hub:x"], tmp_path / "out"
    with monkeypatch.context() as patch:
        if state == "progress.json":
            patch.setattr(preparation, "finish", lambda request, splits: None)
        prepare(*arguments, shard_tokens=3000)
    record = json.loads((tmp_path / "out" / state).read_text())
    source = record[key]
    del source["order"]
    source["inputs"].reverse()
    (tmp_path / "out" / state).write_text(json.dumps(record))
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tokens")}
    found = prepare(*arguments, shard_tokens=3000)
    assert sum(found.total(split, "document_count") for split in found.splits) == 62
    assert before == {path.name: path.stat().st_mtime_ns for path in (tmp_path / "out").glob("*.tokens")}
    with pytest.raises(UserError, match="other files"):
        prepare([jsonl], tmp_path / "out", shard_tokens=3000)


def test_damaged_manifest_and_tokenizer(copied, bpe_corpus, tmp_path_factory):
    manifest = copied / "manifest.json"
    text = manifest.read_text()
    manifest.write_text(text.replace('"format": 1', '"format": 99'))
    with pytest.raises(UserError, match="format is not 1"):
        open_dataset(DataConfig(path=str(copied)))
    manifest.write_text(text[:50])
    with pytest.raises(UserError, match="manifest.json.*cannot be read"):
        open_dataset(DataConfig(path=str(copied)))
    other = tmp_path_factory.mktemp("changed")
    for path in Path(bpe_corpus).iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    changed = (other / "tokenizer.json").read_text().replace('"dropout": null', '"dropout": 0.1')
    (other / "tokenizer.json").write_text(changed)
    with pytest.raises(UserError, match="not the one its tokens were made with"):
        open_dataset(DataConfig(path=str(other)))
    (other / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer.json.*missing"):
        open_dataset(DataConfig(path=str(other)))


def test_bad_requests(jsonl, tmp_path):
    empty = tmp_path / "empty.jsonl"
    empty.write_text('{"text": ""}\n')
    with pytest.raises(UserError, match="no text in them"):
        prepare([str(empty)], tmp_path / "a")
    with pytest.raises(UserError, match="at least one file"):
        prepare([], tmp_path / "b")
    for twice in ([jsonl, jsonl], [str(Path(jsonl).parent), f"{Path(jsonl).parent}/./{Path(jsonl).name}"]):
        with pytest.raises(UserError, match=f"inputs = '.*{Path(jsonl).name}': is there twice"):
            prepare(twice, tmp_path / "e")
    with pytest.raises(UserError, match="validation = 1"):
        prepare([jsonl], tmp_path / "c", validation=1)
    with pytest.raises(UserError, match="shard_tokens = 0"):
        prepare([jsonl], tmp_path / "d", shard_tokens=0)
    with pytest.raises(UserError, match="cannot write here"):
        prepare([jsonl], Path(jsonl) / "under_a_file")
    if os.geteuid():
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(UserError, match="cannot write here.*permissions"):
            prepare([jsonl], tmp_path / "closed" / "out")


def test_held_out_inputs_go_to_validation_whole(jsonl, texts, tmp_path):
    extra = tmp_path / "extra.txt"
    extra.write_text("held out")
    prepare([jsonl], tmp_path / "out", validation=0, held_out=[str(extra)])
    assert [(len(ids), size) for ids, size in raw_documents(tmp_path / "out", "validation")] == [(9, 8)]
    assert len(list(raw_documents(tmp_path / "out", "train"))) == len(texts)
    prepare([jsonl], tmp_path / "none", validation=0)
    with pytest.raises(UserError, match="path = .*its validation split holds no documents.*--validation"):
        open_dataset(DataConfig(path=str(tmp_path / "none")), split="validation")


@pytest.mark.parametrize("runner", ["local", "beam"])
def test_nothing_held_out_is_trained_on(jsonl, texts, tmp_path, monkeypatch, runner):
    """This covers a file among the inputs, a copy under another name, and single documents of both."""
    if runner == "beam":
        in_this_process(monkeypatch)
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "all.jsonl").write_bytes(Path(jsonl).read_bytes())
    (folder / "kept.txt").write_text("held out, as a text\n" * 4000)
    (folder / "copy.md").write_text("held out, as a text\n" * 4000)
    (tmp_path / "some.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts[5:9]))
    held_out = [str(folder / "kept.txt"), str(tmp_path / "some.jsonl")]
    make = {"local": prepare, "beam": prepare_on_beam}[runner]
    make([str(folder)], tmp_path / "out", validation=0.0, held_out=held_out, shard_tokens=7000)
    tokenizer = load_tokenizer("bytes")
    split = {
        name: [tokenizer.decode(ids[:-1]) for ids, _ in raw_documents(tmp_path / "out", name)]
        for name in ("train", "validation")
    }
    assert split["train"] == [*texts[:5], *texts[9:]]
    assert "".join(split["validation"]) == "held out, as a text\n" * 4000 + "".join(texts[5:9])


def test_real_documents(shared_data, tmp_path):
    source = shared_data / "techdocs.valid.jsonl.xz"
    manifest = prepare([str(source)], tmp_path, validation=0.1, shard_tokens=1 << 20)
    assert sum(manifest.total(split, "document_count") for split in manifest.splits) == 240
    assert sum(manifest.total(split, "byte_count") for split in manifest.splits) > 2_000_000
    assert all(shard.exact for shards in manifest.splits.values() for shard in shards)
