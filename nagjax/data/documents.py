"""Reads documents from files one after the other: text, JSON lines and Parquet, plain or compressed."""

import codecs
import io
import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, Literal

from nagjax.data.compressed import BROKEN, OPENERS
from nagjax.data.conversation import FIELDS, shortened, valid_unicode
from nagjax.data.hub import HubDataset
from nagjax.data.storage import HUB_PREFIX, RemotePath, StoragePath, files_under, reached, storage_path
from nagjax.errors import UserError
from nagjax.json_reader import parse_json

TEXT_PIECE = 1 << 15  # characters: a longer text file is cut at line ends into several documents
LONGEST = 1 << 26  # default limit, in characters, for a line of JSON or a row of a table
MAYBE = "?"  # suffix to the name of a field that a line may lack

Inputs = str | os.PathLike | Sequence[str | os.PathLike]  # one file, folder or `hub:` dataset, or several of them

# The field that holds the text in a line of JSON or a row of a table (with MAYBE appended, lines without a text are
# left out); or a function that makes a text of the line and of a description of where it stands.
Field = str | Callable[[Any, str], str]

_TEXT = (".txt", ".md")
_FORMATS = (*_TEXT, ".jsonl", ".parquet")


def split_name(document: str, validation: float) -> Literal["train", "validation"]:
    """Assigns one document to `"train"` or `"validation"` by the SHA-256 of its UTF-8 bytes alone.

    The same text is assigned to the same split in every corpus and on every machine. `validation` is the share of the
    hash range that is held out, so a larger share only ever moves documents out of training.
    """
    draw = int.from_bytes(sha256(document.encode()).digest()[:8], "big")
    return "validation" if draw < validation * 2**64 else "train"


def format_of(path: StoragePath) -> str | None:
    """The format suffix of a file name (`.jsonl` for `a.jsonl.xz`), or None if the format is not supported."""
    suffixes = [suffix.lower() for suffix in path.suffixes]
    if suffixes and suffixes[-1] in OPENERS:
        suffixes.pop()
    return suffixes[-1] if suffixes and suffixes[-1] in _FORMATS else None


def as_names(inputs: Inputs) -> list[str]:
    """The inputs as a list of str, which the functions below take."""
    return [str(name) for name in ([inputs] if isinstance(inputs, str | os.PathLike) else inputs)]


def find_files(inputs: Sequence[str]) -> list[StoragePath]:
    """Every readable file under `inputs` (files and folders), in an order that does not depend on the file system. In
    folders, files and folders whose names begin with a dot are left out.

    Raises UserError for a missing path, an unknown format, or a folder with nothing readable in it.
    """
    found = []
    for name in inputs:
        path = storage_path(name, "inputs")
        with _readable(path):
            found += _files_of(path)
    return found


def _files_of(path: StoragePath) -> list[StoragePath]:
    if path.is_dir():
        inside = [p for _, p in files_under(path) if format_of(p)]
        if not inside:
            raise UserError("inputs", str(path), f"the folder holds no {', '.join(_FORMATS)} file")
        for file in inside:
            if isinstance(file, Path) and not file.exists():
                raise UserError("inputs", str(file), "is a link that leads nowhere: bring the file back, or remove it")
        return inside
    if not path.exists():
        raise UserError("inputs", str(path), "no such file or folder; a Hugging Face dataset is hub:OWNER/NAME")
    if format_of(path) is None:
        raise UserError("inputs", str(path), f"unknown format; use {', '.join(_FORMATS)}, plain or .gz, .xz, .zst")
    return [path]


def left_out(inputs: Inputs) -> list[str]:
    """The files in folders among the inputs that are left out of the text because of their format."""
    found = []
    for path in (storage_path(name, "inputs") for name in as_names(inputs) if not name.startswith(HUB_PREFIX)):
        with _readable(path):
            found += [str(file) for _, file in files_under(path) if not format_of(file)] if path.is_dir() else []
    return found


def read_documents(inputs: Inputs, *, field: Field = "text", longest: int = LONGEST) -> Iterator[str]:
    """Streams the documents of files, folders and `hub:` datasets, holding one at a time in memory.

    A JSON line or Parquet row is one document: its `field`, or the result of the function `field`. It has at most
    `longest` characters, because a small compressed file can hold a line larger than any memory. A text file is one
    document, or several of about `TEXT_PIECE` characters. Raises UserError naming file and line for what cannot be
    read.
    """
    return (text for text, _ in _documents(as_names(inputs), field, longest))


def _documents(inputs: Sequence[str], field: Field, longest: int) -> Iterator[tuple[str, bool]]:
    """The documents of `read_documents`, each with whether its split is drawn anew: of a text file, only the first
    one's is."""
    for source in sources(inputs):
        of_hub = isinstance(source, str)
        texts = _hub_documents(source, field, longest) if of_hub else _file_documents(source, field, longest)
        whole = not of_hub and format_of(source) in _TEXT
        for number, text in enumerate(map(valid_unicode, texts)):
            yield text, number == 0 or not whole


def sources(inputs: Sequence[str]) -> Iterator[str | StoragePath]:
    """The names of the `hub:` datasets and the paths of the files among the inputs, in the order in which they are
    read."""
    for name in inputs:
        yield from [name] if name.startswith(HUB_PREFIX) else find_files([name])


def is_one_text(inputs: Sequence[str]) -> bool:
    """Whether the inputs are a single text file."""
    found = [*sources(inputs)]
    return len(found) == 1 and not isinstance(found[0], str) and format_of(found[0]) in _TEXT


def fingerprints(inputs: Sequence[str], *, field: Field = "text", longest: int = LONGEST) -> frozenset[bytes]:
    """Fingerprints of every text in the inputs in the forms that another format may give it: whole, as a line or row
    would, and in the pieces that a text file is cut into (a text no longer than a piece is one). Pieces are not cut
    again."""
    found, file = set(), sha256()
    for text, first in _documents(as_names(inputs), field, longest):
        file = sha256() if first else file
        file.update(text.encode())
        found |= {_short(file), *map(_fingerprint, _pieces(io.StringIO(text, newline="")))}
    return frozenset(found)


def _fingerprint(text: str) -> bytes:
    return _short(sha256(text.encode()))


def _short(digest: Any) -> bytes:
    return digest.digest()[:16]


def split_documents(
    inputs: Sequence[str],
    validation: float,
    *,
    field: Field = "text",
    longest: int = LONGEST,
    by_place: bool = False,
    without: AbstractSet[bytes] = frozenset(),
) -> Iterator[tuple[str, Literal["train", "validation"]]]:
    """The documents of `read_documents`, each with its split by `split_name`. All documents of a text file get the
    split of its first one, so that no file is in both. `by_place` is for a corpus of one text file: its end is held
    out, and a short file is cut in two for this. Documents whose fingerprints are in `without` are left out."""
    if by_place:
        yield from _split_by_place(inputs, validation, without)
        return
    side = "train"
    for text, drawn in _documents(inputs, field, longest):
        side = split_name(text, validation) if drawn else side
        if _stays(text, without):
            yield text, side


def _stays(text: str, without: AbstractSet[bytes]) -> bool:
    return not without or _fingerprint(text) not in without


def _split_by_place(
    inputs: Sequence[str], validation: float, without: AbstractSet[bytes]
) -> Iterator[tuple[str, Literal["train", "validation"]]]:
    """Holds out the documents that reach into the last share of the characters, but never the first one; documents in
    `without` do not count. Reads the file twice, because its length is known only at its end."""
    lengths = [len(text) for text in read_documents(inputs) if _stays(text, without)]
    before, total = 0, sum(lengths)
    texts = (text for text in read_documents(inputs) if _stays(text, without))
    if len(lengths) == 1 and validation:
        texts = _in_two(next(texts), 1.0 - validation)
    for text in texts:
        after = before + len(text)
        yield text, "validation" if before and after > (1.0 - validation) * total else "train"
        before = after


def _in_two(text: str, share: float) -> Iterator[str]:
    """Cuts the text at the first line end after a share of it, or if there is none, at the last line end before."""
    *inner, end = itertools.accumulate(map(len, io.StringIO(text, newline="")))
    cut = next((place for place in inner if place >= share * end), inner[-1] if inner else end)
    yield from filter(None, (text[:cut], text[cut:]))


def _file_documents(path: StoragePath, field: Field, longest: int) -> Iterator[str]:
    kind = format_of(path)
    with _readable(path):
        if kind == ".parquet":
            yield from _parquet_documents(path, field, longest)
            return
        with path.open("rb") as raw, io.TextIOWrapper(_unpacking(path, raw), encoding="utf-8-sig", newline="") as file:
            if kind in _TEXT and not isinstance(field, str):
                raise UserError("inputs", str(path), "is plain text: give conversations as .jsonl or .parquet")
            yield from _pieces(file) if kind in _TEXT else _json_lines(file, path, field, longest)


def _unpacking(path: StoragePath, raw: IO[bytes]) -> IO[bytes]:
    """A stream of the file's decompressed content."""
    return OPENERS.get(path.suffix.lower(), lambda raw: raw)(raw)


def _pieces(file: IO[str]) -> Iterator[str]:
    while piece := file.read(TEXT_PIECE):
        yield piece + file.readline(TEXT_PIECE)


def _json_lines(file: IO[str], path: StoragePath, field: Field, longest: int) -> Iterator[str]:
    for number in itertools.count(1):
        if not (line := file.readline(longest + 1)):
            return
        if not line.strip():
            continue
        where = f"{path}:{number}"
        if len(line) > longest:
            raise _too_long(where, longest)
        try:
            record = parse_json(line, lenient=True)
        except ValueError as error:
            raise UserError("inputs", where, f"not a line of JSON ({error})") from None
        yield from _text_of(record, field, where, longest)


def _text_of(record: Any, field: Field, where: str, longest: int) -> Iterator[str]:
    """Yields the text of a line of JSON or a row of a table; nothing if it has none and may lack it."""
    if isinstance(field, str):
        name = field.removesuffix(MAYBE)
        value = record.get(name) if isinstance(record, dict) else None
        if value is None and name != field and isinstance(record, dict):
            return
        if not isinstance(value, str):
            raise UserError("inputs", where, _no_text(record, name))
    else:
        value = field(record, where)
    if len(value) > longest:
        raise _too_long(where, longest)
    yield value


def _no_text(record: Any, name: str) -> str:
    if not isinstance(record, dict):
        return f"no text in field {name!r}: it is not an object; name the field with --field"
    without = f"leave such lines out with --field '{name}{MAYBE}'"
    if name not in record:
        return f"no text in field {name!r}: it has {sorted(record)}; name the field with --field, or {without}"
    if record[name] is None:
        return f"no text in field {name!r}: it is null; {without}"
    return f"no text in field {name!r}: it is {shortened(repr(record[name]))}; name the field with --field"


def _too_long(where: str, longest: int) -> UserError:
    fix = f"a document of more than {longest:,} characters: allow longer ones with --longest, or leave it out"
    return UserError("inputs", where, fix)


def _parquet_documents(path: StoragePath, field: Field, longest: int) -> Iterator[str]:
    import pyarrow.parquet

    if path.suffix.lower() in OPENERS:
        raise UserError("inputs", str(path), "Parquet compresses its own columns: unpack the file first")
    try:
        with path.open("rb") as raw, pyarrow.parquet.ParquetFile(raw) as file:
            names = file.schema_arrow.names
            name = field.removesuffix(MAYBE) if isinstance(field, str) else ""
            if name and name not in names:
                raise UserError("inputs", str(path), f"no column {name!r}; it has {names}: use --field")
            columns = [name] if name else [name for name in names if name in FIELDS] or names
            rows = file.iter_batches(batch_size=1, columns=columns)  # one: a row may be very large
            for row, record in enumerate((batch.to_pylist()[0] for batch in rows), 1):
                yield from _text_of_row(record, field, f"{path}:{row}", longest)
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:  # the last: a time beyond Python's
        if isinstance(error, PermissionError):
            raise
        raise UserError("inputs", str(path), f"not a whole Parquet file ({error}); fetch it again") from None


def _text_of_row(row: Any, field: Field, where: str, longest: int) -> Iterator[str]:
    return _text_of(row if isinstance(field, str) else _without_nulls(row), field, where, longest)


def _without_nulls(value: Any) -> Any:
    """A table's value as a line of JSON would have it: without the nulls that a table writes for absent fields."""
    if isinstance(value, dict):
        return {name: _without_nulls(own) for name, own in value.items() if own is not None}
    return [_without_nulls(own) for own in value] if isinstance(value, list) else value


def _hub_documents(name: str, field: Field, longest: int) -> Iterator[str]:
    for number, row in enumerate(HubDataset.of(name).rows(), 1):
        yield from _text_of_row(row, field, f"{name}:{number}", longest)


@contextmanager
def _readable(path: StoragePath) -> Iterator[None]:
    try:
        with reached(path, "inputs"), _unpacked(path):
            yield
    except UnicodeDecodeError as error:
        where = f"{path}:{_line_not_utf8(path)}"
        raise UserError("inputs", where, f"not UTF-8 ({error.reason}); convert it to UTF-8") from None
    except PermissionError:
        raise UserError("inputs", str(path), "no permission to read it") from None


def _line_not_utf8(path: StoragePath) -> int:
    """The number of the first line that is not UTF-8, from 1. Reads the file anew, because a decoder reports positions
    only within its own buffer."""
    number = 1
    with path.open("rb") as raw:
        decoder, file = codecs.getincrementaldecoder("utf-8")(), _unpacking(path, raw)
        while piece := file.read(TEXT_PIECE):
            try:
                number += decoder.decode(piece).count("\n")
            except UnicodeDecodeError as error:
                return number + error.object[: error.start].count(b"\n")
    return number


@contextmanager
def _unpacked(path: StoragePath) -> Iterator[None]:
    try:
        yield
    except BROKEN as error:
        of_store = isinstance(path, RemotePath) and type(error) is OSError
        if getattr(error, "errno", None) is not None or of_store:
            raise
        fix = f"the compressed file is cut short or damaged ({error}); fetch it again"
        raise UserError("inputs", str(path), fix) from None
