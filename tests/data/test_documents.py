import gzip
import itertools
import json
import lzma
import os
import random
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
import zstandard

from nagjax.data import DataConfig, compressed, open_dataset, prepare, read_documents, storage, train_bpe
from nagjax.data.documents import TEXT_PIECE, find_files, fingerprints, is_one_text, split_documents, split_name
from nagjax.data.storage import files_under, storage_path
from nagjax.errors import UserError

PACK = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": lambda data: zstandard.ZstdCompressor().compress(data),
}
DOCUMENTS = ["first: naïve", "second\r\nline", "日本語 🙂"]


@pytest.mark.parametrize("suffix", PACK)
def test_every_packing_of_json_lines_and_text(tmp_path, suffix):
    lines = tmp_path / f"a.jsonl{suffix}"
    lines.write_bytes(PACK[suffix]("\n".join(json.dumps({"text": d}) for d in DOCUMENTS).encode()))
    assert list(read_documents([str(lines)])) == DOCUMENTS
    text = tmp_path / f"b.md{suffix}"
    text.write_bytes(PACK[suffix](DOCUMENTS[1].encode()))
    assert list(read_documents([str(text)])) == [DOCUMENTS[1]]


def test_a_mark_of_the_byte_order_is_no_text(tmp_path):
    for name, content in (("a.jsonl", '{"text": "one"}\n{"text": "two"}\n'), ("b.txt", "one")):
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
    assert list(read_documents([str(tmp_path)])) == ["one", "two", "one"]


def test_parquet_and_field(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"body": DOCUMENTS, "n": [1, 2, 3]}), path)
    assert list(read_documents([str(path)], field="body")) == DOCUMENTS
    with pytest.raises(UserError, match=r"no column 'text'.*body.*--field"):
        list(read_documents([str(path)]))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="not a whole Parquet file"):
        list(read_documents([str(path)], field="body"))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["one", None]}), path)
    with pytest.raises(UserError, match=r"a.parquet:2.*field 'text': it is null"):
        list(read_documents([str(path)]))
    assert list(read_documents([str(path)], field="text?")) == ["one"]
    with pytest.raises(UserError, match="no column 'body'"):
        list(read_documents([str(path)], field="body?"))


def test_lines_without_a_text_are_left_out_where_it_is_asked_for(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": null}\n{"body": 3}\n{"text": "two"}\n')
    assert list(read_documents([str(path)], field="text?")) == ["one", "two"]
    manifest = prepare([str(path)], tmp_path / "out", field="text?", validation=0.0)
    assert manifest.total("train", "document_count") == 2
    path.write_text('{"text": "one"}\n{"text": 3}\n')
    with pytest.raises(UserError, match="a.jsonl:2.*'text': it is 3"):
        list(read_documents([str(path)], field="text?"))


def test_folder_order_is_by_name(tmp_path):
    for name in ("z/1.txt", "a/2.txt", "a/1.txt", "b.txt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(name)
    (tmp_path / "ignored.bin").write_text("no")
    for hidden in (".venv/LICENSE.txt", "a/.cache/b/c.txt", ".draft.txt"):
        (tmp_path / hidden).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / hidden).write_text("hidden")
    assert list(read_documents([str(tmp_path)])) == ["a/1.txt", "a/2.txt", "b.txt", "z/1.txt"]
    assert [p.name for p in find_files([str(tmp_path / "b.txt")])] == ["b.txt"]


def test_one_input_may_stand_alone_and_be_a_path(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("text")
    for inputs in (path, str(path), [path], (str(path),)):
        assert list(read_documents(inputs)) == ["text"]
        out = tmp_path / "corpus"
        assert prepare(inputs, out, held_out=inputs, validation=0.0).total("validation", "document_count") == 1
        assert train_bpe(inputs, 260, tmp_path / "t.json").vocab_size <= 260


def test_a_folder_that_may_not_be_read(tmp_path, monkeypatch):
    """Not even one inside the input. (The superuser may read all.)"""
    listed = Path.iterdir

    def refuse(folder):
        if folder.name in ("locked", ".locked"):
            raise PermissionError(13, "Permission denied")
        return listed(folder)

    monkeypatch.setattr(Path, "iterdir", refuse)
    (tmp_path / ".locked").mkdir()
    (tmp_path / "a.txt").write_text("text")
    assert find_files([str(tmp_path)]) == [tmp_path / "a.txt"], "nothing is looked for in what is left out"
    for folder in (tmp_path, tmp_path / "locked"):
        (tmp_path / "locked").mkdir(exist_ok=True)
        (tmp_path / "a.txt").write_text("text")
        with pytest.raises(UserError, match="no permission to read it"):
            find_files([str(folder)])


def test_pipes_and_a_tower_of_links_are_not_read(tmp_path, monkeypatch):
    """Two links in each of thirty folders to the next one are 2 ** 30 ways to one file."""
    os.mkfifo(tmp_path / "pipe")
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "a.txt").symlink_to("/dev/zero")
    (inputs / "b.txt").symlink_to(tmp_path / "pipe")
    (inputs / "c.txt").write_text("text")
    folders = [tmp_path / f"floor{i}" for i in range(30)]
    for folder in folders:
        folder.mkdir()
    for lower, upper in itertools.pairwise([inputs, *folders]):
        (lower / "left").symlink_to(upper)
        (lower / "right").symlink_to(upper)
    assert [name for name, _ in files_under(inputs)] == ["c.txt"]
    monkeypatch.setattr(storage, "MOST_ENTERED", 100)
    with pytest.raises(UserError, match="inputs = .*(left|right)': more than 100 links to folders"):
        files_under(inputs)


def test_links_are_followed_once_and_must_lead_somewhere(tmp_path):
    inputs, away = tmp_path / "in", tmp_path / "away"
    inputs.mkdir()
    away.mkdir()
    (inputs / "a.txt").write_text("here")
    (away / "b.txt").write_text("linked")
    (inputs / "sub").symlink_to(away)
    (away / "back").symlink_to(inputs)
    assert list(read_documents(inputs)) == ["here", "linked"]
    (inputs / "annexed.txt").symlink_to(tmp_path / "nowhere")
    with pytest.raises(UserError, match="annexed.txt.*leads nowhere"):
        list(read_documents(inputs))


@pytest.mark.parametrize("name", ["s3://bucket/in.jsonl", "s3://bucket/in.jsonl.gz", "hub:owner/name", "memory://in"])
def test_a_store_that_cannot_be_reached(tmp_path, monkeypatch, name):
    class Gone:
        def __getattr__(self, name):
            raise OSError("Could not resolve host")

    path = storage_path(name)
    monkeypatch.setattr(type(path), "_store", Gone())
    source = str(path)
    for act in (
        lambda: find_files([source]),
        lambda: list(read_documents(source)),
        lambda: prepare(source, tmp_path / "out"),
        lambda: open_dataset(DataConfig(source)),
    ):
        with pytest.raises(UserError, match="OSError: Could not resolve host.*check the name, the network"):
            act()
    if not source.startswith("hf:"):
        (tmp_path / "in.txt").write_text("text")
        with pytest.raises(UserError, match="out = .*Could not resolve host"):
            prepare(tmp_path / "in.txt", source)


def test_long_text_is_cut_at_lines_and_loses_nothing(tmp_path):
    text = "".join(f"line {i} é\r\n" for i in range(12_000))
    (tmp_path / "long.txt").write_text(text, newline="")
    pieces = list(read_documents([str(tmp_path)]))
    assert "".join(pieces) == text and len(pieces) > 3
    assert all(piece.endswith("\n") and len(piece) < TEXT_PIECE + 20 for piece in pieces)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_no_file_is_on_both_sides(tmp_path, suffix):
    """A long text file is several documents on one side; each line of JSON is drawn by itself."""
    for book in range(12):
        text = "".join(f"book {book} line {i} of many\n" for i in range(4_000))
        (tmp_path / f"{book}.txt{suffix}").write_bytes(PACK[suffix](text.encode()))
    books = {}
    for text, side in split_documents([str(tmp_path)], 0.4):
        books.setdefault(text.split()[1], []).append(side)
    assert len(books) == 12 and all(len(sides) > 2 and len(set(sides)) == 1 for sides in books.values())
    assert {sides[0] for sides in books.values()} == {"train", "validation"}
    lines = tmp_path / "lines.jsonl"
    lines.write_text("".join(json.dumps({"text": f"document {i}"}) + "\n" for i in range(60)))
    drawn = list(split_documents([str(lines)], 0.2))
    assert drawn == [(text, split_name(text, 0.2)) for text, _ in drawn]
    assert {side for _, side in drawn} == {"train", "validation"}


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_of_one_text_file_the_end_is_held_out(tmp_path, suffix):
    text = "".join(f"line {i} of many\n" for i in range(20_000))
    file = tmp_path / f"book.txt{suffix}"
    file.write_bytes(PACK[suffix](text.encode()))
    assert is_one_text([str(file)]) and is_one_text([str(tmp_path)]) and not is_one_text([str(file)] * 2)
    drawn = list(split_documents([str(file)], 0.2, by_place=True))
    sides = [side for _, side in drawn]
    assert "".join(piece for piece, _ in drawn) == text and sides == sorted(sides)  # train comes first
    held_out = sum(len(piece) for piece, side in drawn if side == "validation")
    assert 0.2 * len(text) <= held_out < 0.2 * len(text) + 2 * TEXT_PIECE
    file.write_bytes(PACK[suffix]("a\r\nb\nc\u2028\nd\n".encode()))
    drawn = list(split_documents([str(file)], 0.4, by_place=True))
    assert drawn == [("a\r\nb\nc\u2028\n", "train"), ("d\n", "validation")]
    assert [side for _, side in split_documents([str(file)], 0.0, by_place=True)] == ["train"]
    file.write_bytes(PACK[suffix](b"one line\n"))
    assert list(split_documents([str(file)], 0.2, by_place=True)) == [("one line\n", "train")]


@pytest.mark.parametrize("kinds", [("book.txt", "book.jsonl"), ("book.jsonl", "book.txt"), ("book.md", "book.txt")])
def test_what_is_held_out_is_left_out_in_another_format_too(tmp_path, kinds):
    """A text that is longer than a piece is several documents in a text file, and one in a line of JSON."""
    book, other = ("".join(f"{name} {i}\r\n" for i in range(9000)) for name in ("held", "trained"))
    for kind in kinds:
        whole = json.dumps({"text": book}) + "\n" if kind.endswith(".jsonl") else book
        (tmp_path / kind).write_bytes(whole.encode())
    (tmp_path / "other.txt").write_bytes(other.encode())
    apart = fingerprints([str(tmp_path / kinds[0])])
    left = [
        text for text, _ in split_documents([str(tmp_path / kinds[1]), str(tmp_path / "other.txt")], 0, without=apart)
    ]
    assert "".join(left) == other


@pytest.mark.parametrize("validation", [0.0, 0.2])
@pytest.mark.parametrize("lines", [3, 9000])
def test_a_text_that_is_held_out_is_not_trained_on_where_it_is_all_there_is(tmp_path, lines, validation):
    path = tmp_path / "a.txt"
    path.write_text("".join(f"line {i}\n" for i in range(lines)))
    apart = fingerprints([str(path)])
    assert list(split_documents([str(path)], validation, by_place=True, without=apart)) == []


def test_half_surrogates_become_replacement_characters(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "a\\ud800b"}\n{"text": "\\ud83d\\ude42"}\n')
    assert list(read_documents([str(path)])) == ["a\ufffdb", "🙂"]


def test_split_is_stable_disjoint_and_of_the_asked_size():
    texts = [f"document {i}" for i in range(4000)]
    sides = [split_name(text, 0.05) for text in texts]
    assert sides == [split_name(text, 0.05) for text in texts]
    assert 150 < sides.count("validation") < 250
    # Frozen: the side of a document must never change between releases.
    assert [i for i in range(60) if sides[i] == "validation"] == [21, 22, 55, 59]
    wider = [split_name(text, 0.2) for text in texts]
    assert all(w == "validation" for s, w in zip(sides, wider, strict=True) if s == "validation")
    assert all(split_name(text, 0.0) == "train" for text in texts)


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.jsonl", b'{"text": "x"}\n{"body": "y"}\n', r"a.jsonl:2.*no text in field 'text'.*body.*--field"),
        ("a.jsonl", b'{"text": "x"}\n\n{"text": 3}\n', r"a.jsonl:3.*no text"),
        ("a.jsonl", b'{"text": "x"}\n[1]\n', r"a.jsonl:2.*not an object"),
        ("a.jsonl", b'{"text": "x"}\n{"text": \n', r"a.jsonl:2.*not a line of JSON"),
        ("a.txt", b"caf\xe9", "a.txt:1'.*not UTF-8"),
        ("a.txt", "a\n\u00e9\n".encode() * 40_000 + b"caf\xe9", "a.txt:80001'.*not UTF-8"),
        ("a.jsonl", b'{"text": null}', "field 'text': it is null; leave such lines out with --field 'text\\?'"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "x"}\n' * 99, mtime=0)[:-12], "cut short or damaged"),
        ("a.jsonl.xz", lzma.compress(b'{"text": "x"}\n' * 99)[:-12], "cut short or damaged"),
        ("a.jsonl.zst", b"not zstandard at all", "cut short or damaged"),
        ("a.txt.gz", b"plain", "cut short or damaged"),
        ("a.csv", b"a,b", "unknown format"),
        ("a.parquet.gz", b"", "unpack the file"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else None,
)
def test_bad_files_are_named(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError, match=message):
        list(read_documents([str(path)]))


@pytest.mark.parametrize("suffix", [name for name in PACK if name])
def test_a_bomb_takes_no_more_memory_than_one_document_may(tmp_path, suffix):
    path = tmp_path / f"bomb.jsonl{suffix}"
    path.write_bytes(PACK[suffix](b'{"text": "x"}\n{"text": "' + b"a" * (64 << 20)))
    assert path.stat().st_size < 1 << 18
    found = read_documents([str(path)], longest=100_000)
    tracemalloc.start()
    assert next(found) == "x"
    with pytest.raises(UserError, match=r"bomb.jsonl.*:2.*more than 100,000 characters.*--longest"):
        next(found)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16 << 20


def test_a_table_of_large_rows_is_held_row_by_row(tmp_path):
    """A few hundred bytes of Parquet can hold hundreds of rows of megabytes each."""
    path, rows, size = tmp_path / "a.parquet", 60, 4 << 20
    places = pyarrow.array([0] * rows, pyarrow.int32())
    column = pyarrow.DictionaryArray.from_arrays(places, pyarrow.array(["x" * size]))
    pyarrow.parquet.write_table(pyarrow.table({"text": column}), path, compression="zstd")
    assert path.stat().st_size < 1 << 14
    kept, pool = pyarrow.default_memory_pool(), pyarrow.proxy_memory_pool(pyarrow.default_memory_pool())
    pyarrow.set_memory_pool(pool)
    try:
        assert sum(map(len, read_documents([str(path)]))) == rows * size
    finally:
        pyarrow.set_memory_pool(kept)
    assert size < pool.max_memory() < rows * size / 4


@pytest.mark.parametrize("suffix", [name for name in PACK if name])
def test_a_file_cut_anywhere_is_never_taken_for_a_whole_one(tmp_path, suffix):
    path, noise = tmp_path / f"a.txt{suffix}", random.Random(0).randbytes(150_000).hex().encode()
    parts = [PACK[suffix](b"first " * 999), PACK[suffix](noise)]  # streams, the second of several blocks
    if suffix == ".zst":
        unknown = zstandard.ZstdCompressor(write_checksum=True, write_content_size=False)
        parts += [(0x184D2A53).to_bytes(4, "little") + (5).to_bytes(4, "little") + b"notes", unknown.compress(b"end")]
    whole, borders = b"".join(parts), {sum(map(len, parts[:i])) for i in range(1, len(parts))}
    path.write_bytes(whole)
    text = "".join(read_documents([str(path)]))
    assert text == "first " * 999 + noise.decode() + ("end" if suffix == ".zst" else "")
    for size in {
        *range(1, 120),
        *range(len(whole) - 40, len(whole)),
        *range(120, len(whole), len(whole) // 50),
        *borders,
    }:
        path.write_bytes(whole[:size])
        if size in borders:
            assert text.startswith("".join(read_documents([str(path)])))
        else:
            with pytest.raises(UserError, match="cut short or damaged"):
                list(read_documents([str(path)]))


def test_a_row_of_a_table_is_as_long_as_allowed(tmp_path):
    path = tmp_path / "a.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"text": ["short", "x" * 2000]}), path)
    with pytest.raises(UserError, match=r"a.parquet:2.*more than 1,000 characters.*--longest"):
        list(read_documents([str(path)], longest=1000))


def test_the_memory_that_unpacking_xz_may_take_is_bounded(tmp_path, monkeypatch):
    path = tmp_path / "a.txt.xz"
    path.write_bytes(lzma.compress(b"one ", preset=6) + bytes(8) + lzma.compress(b"two" * 100_000, preset=6) + bytes(4))
    assert "".join(read_documents([str(path)])) == "one " + "two" * 100_000
    monkeypatch.setattr(compressed, "XZ_MEMORY", 1 << 20)
    with pytest.raises(UserError, match="Memory usage limit"):
        list(read_documents([str(path)]))


def test_absent_paths_and_empty_folders(tmp_path):
    with pytest.raises(UserError, match="no such file.*hub:OWNER/NAME"):
        list(read_documents([str(tmp_path / "absent")]))
    with pytest.raises(UserError, match="the folder holds no"):
        list(read_documents([str(tmp_path)]))


def test_a_file_s_name_need_not_be_utf_8(tmp_path):
    """Linux allows any bytes in it."""
    folder = tmp_path / "in"
    folder.mkdir()
    try:
        (folder / os.fsdecode(b"caf\xe9.jsonl")).write_text('{"text": "one"}\n' * 600)
    except OSError:
        pytest.skip("this file system has UTF-8 names alone")
    (folder / "zoo.jsonl").write_text("not JSON\n")
    for _ in range(2):  # the second time an unfinished corpus is there
        with pytest.raises(UserError, match=r"zoo.jsonl:1"):
            prepare(folder, tmp_path / "out", validation=0.0, shard_tokens=20)
        assert (tmp_path / "out" / "progress.json").exists()
    (folder / "zoo.jsonl").unlink()
    made = prepare(folder, tmp_path / "other", validation=0.0)
    assert made == prepare(folder, tmp_path / "other", validation=0.0)
    assert made.source["inputs"][0][0].endswith(r"caf\udce9.jsonl")
