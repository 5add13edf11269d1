"""Token shards on disk: flat files, which are mapped and never parsed, and a manifest that says which are complete.

A corpus folder holds `manifest.json`, the tokenizer, and for every shard two little-endian files:

- `SPLIT-NNNNN.tokens`: the documents' tokens one after the other, each document closed by its end-of-text token;
  in a corpus of conversations int32, where -1 - id is a token that is read but does not count as a target;
- `SPLIT-NNNNN.documents`: int64 `[documents, 2]`: where each document ends, in tokens from the start of the
  shard, and how many UTF-8 bytes its text has.

Every file appears under its name only when it is complete, and only files named in the manifest are read.
"""

import errno
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from hashlib import file_digest, sha256
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Int32, Int64

from nagjax.data.manifest import ANEW, FORMAT, FileRecord, Manifest, ShardRecord
from nagjax.data.storage import StoragePath, reached, size_of, storage_path
from nagjax.data.stream import ArrayFile, TokenStream
from nagjax.data.tokenizer import LARGEST as LARGEST_TOKENIZER
from nagjax.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer
from nagjax.errors import UserError
from nagjax.files import PARTIAL, create, inside, partial_name, read_bytes, refuse_link, sync_folder
from nagjax.json_reader import parse_json

MANIFEST, PROGRESS, TOKENIZER = "manifest.json", "progress.json", "tokenizer.json"
SPLITS = ("train", "validation")
TOKEN_TYPES = ("<u2", "<u4")
COUNTED_TYPE = "<i4"  # dtype of a corpus in which not all targets count
LARGEST = 1 << 28  # bytes of a manifest, enough for a million shards
SMALL = 1 << 26  # bytes up to which a split is hashed whenever it is opened, in a fraction of a second


@dataclass(frozen=True)
class Document:
    """One tokenised document: its ids without the end-of-text token, the UTF-8 length of its text, and which of its
    tokens (the last is the end-of-text token) count as targets; None: all."""

    ids: Int32[np.ndarray, "n"]
    byte_count: int
    counted: Bool[np.ndarray, "n+1"] | None = None


def token_dtype(tokenizer: Tokenizer) -> str:
    """The smallest little-endian type that holds every id."""
    return TOKEN_TYPES[tokenizer.vocab_size > 1 << 16]


def in_memory(documents: Sequence[Document], tokenizer: Tokenizer) -> TokenStream:
    """The token stream that a folder with these documents would give, in memory."""
    if not documents:
        return TokenStream([], True)
    tokens = np.concatenate(list(_with_ends(documents, tokenizer)))
    return TokenStream([(tokens, _index(documents))], _is_exact(documents, tokenizer))


def write_shard(
    folder: StoragePath, split: str, number: int, documents: Sequence[Document], tokenizer: Tokenizer
) -> ShardRecord:
    """Writes documents as shard `number` of `split`; both files are complete and on disk when this returns."""
    stem, index = f"{split}-{number:05d}", _index(documents)
    return ShardRecord(
        tokens=write_file(folder, f"{stem}.tokens", _with_ends(documents, tokenizer)),
        documents=write_file(folder, f"{stem}.documents", [index]),
        token_count=int(index[-1, 0]),
        document_count=len(documents),
        byte_count=int(index[:, 1].sum()),
        exact=_is_exact(documents, tokenizer),
    )


def write_file(folder: StoragePath, name: str, parts: Iterable[bytes | np.ndarray]) -> FileRecord:
    """Writes `folder/name` so that no reader ever sees an incomplete file. On failure removes what was written; raises
    UserError if the file cannot be written."""
    digest, size, here = sha256(), 0, isinstance(folder, Path)
    partial = folder / f".{partial_name(name)}"
    with cannot_write(folder):
        try:
            with _new_file(partial) as file:
                for part in parts:
                    data = memoryview(part).cast("B")
                    digest.update(data)
                    size += data.nbytes
                    file.write(data)
                if here:
                    file.flush()
                    os.fsync(file.fileno())
            if here:
                refuse_link(folder / name)
            partial.replace(folder / name)
            if here:
                sync_folder(folder)
        finally:
            partial.unlink(missing_ok=True)
    return FileRecord(name, size, digest.hexdigest())


def _new_file(path: StoragePath):
    """Opens a file for writing, without following a link at its path."""
    if not isinstance(path, Path):
        return path.open("wb")
    path.unlink(missing_ok=True)
    return open(create(path), "wb")


def abandoned(folder: Path) -> Iterator[Path]:
    """Unfinished files whose writer no longer runs on this machine."""
    for path in folder.glob(f".*{PARTIAL}"):
        process = path.name.removesuffix(PARTIAL).rpartition(".")[2].partition("-")[0]
        try:
            os.kill(int(process), 0)
        except (ValueError, OverflowError, ProcessLookupError):
            yield path
        except OSError:  # a process of another user
            pass


def read_own(path: StoragePath, largest: int = LARGEST) -> bytes:
    """The bytes of a corpus's file, which on this machine must not be a link out of its folder. Raises OSError, and
    UserError for such a link and for more than `largest` bytes."""
    if isinstance(path, Path):
        return read_bytes(path, largest=largest)
    if path.is_file() and path.size() > largest:
        raise UserError("path", str(path), f"has more than {largest:,} bytes: it is not what its name says")
    return path.read_bytes()


def write_json(folder: StoragePath, name: str, data: dict) -> FileRecord:
    return write_file(folder, name, [(json.dumps(data, indent=1, ensure_ascii=False) + "\n").encode()])


def write_manifest(
    folder: StoragePath,
    tokenizer: Tokenizer,
    source: dict,
    splits: dict[str, list[ShardRecord]],
    dtype: str | None = None,
) -> Manifest:
    """Writes the tokenizer beside the shards, then the manifest, with which the folder becomes a corpus."""
    manifest = Manifest(tokenizer.name, tokenizer.fingerprint, dtype or token_dtype(tokenizer), source, splits)
    if (text := tokenizer.to_json()) is not None:
        write_file(folder, TOKENIZER, [text.encode()])
    write_json(folder, MANIFEST, manifest.to_json())
    return manifest


def read_manifest(folder: str | os.PathLike) -> Manifest:
    """The manifest of a corpus folder. Raises UserError if it is missing, damaged or of another format, and if the
    folder's manifest.json was written by another program."""
    folder = storage_path(folder)
    try:
        with reached(folder, "path"):
            content = read_own(folder / MANIFEST)
        data = parse_json(content)
    except (FileNotFoundError, NotADirectoryError):
        if (folder / PROGRESS).exists():
            fix = 'was not finished: run the same "nagjax data" command again, it goes on where it stopped'
        else:
            state = "is not a corpus folder" if folder.exists() else "does not exist"
            fix = f'{state} (no {MANIFEST}); make it with "nagjax data prepare", or use "stdlib"'
        raise UserError("path", str(folder), fix) from None
    except OSError as error:
        raise UserError("path", str(folder / MANIFEST), f"cannot be read: {error}") from None
    except ValueError as error:
        raise UserError("path", str(folder / MANIFEST), f"cannot be read ({error}): copy it again, or {ANEW}") from None
    if not isinstance(data, dict) or "format" not in data:
        raise UserError("path", str(folder), f"its {MANIFEST} is not that of a corpus: choose another folder")
    if data["format"] != FORMAT:
        raise UserError("path", str(folder), f"its format is not {FORMAT}: {ANEW}")
    try:
        manifest = Manifest.from_json(data)
        if manifest.dtype not in (*TOKEN_TYPES, COUNTED_TYPE):
            raise ValueError(f"tokens of type {manifest.dtype!r}")
    except (ValueError, UserError) as error:
        if isinstance(error, UserError) and error.field == "path":
            raise
        raise UserError("path", str(folder / MANIFEST), f"is damaged ({error}): {ANEW}") from None
    return manifest


def saved_tokenizer(folder: StoragePath, name: str) -> JsonTokenizer:
    """The tokenizer in a corpus folder. Raises OSError, ValueError and UserError."""
    return JsonTokenizer(read_own(folder / TOKENIZER, LARGEST_TOKENIZER).decode(), name=name)


def open_tokenizer(folder: StoragePath, manifest: Manifest) -> Tokenizer:
    """The tokenizer with which a folder was prepared. Raises UserError if it was changed since."""
    tokenizer: Tokenizer = ByteTokenizer()
    if manifest.tokenizer_fingerprint != tokenizer.fingerprint:
        path = folder / TOKENIZER
        try:
            tokenizer = saved_tokenizer(folder, manifest.tokenizer_name)
        except (OSError, UnicodeDecodeError):
            raise UserError("path", str(path), f"is missing or unreadable: copy it again, or {ANEW}") from None
        except UserError as error:
            if error.field != "tokenizer":
                raise
            raise UserError("path", str(path), f"is damaged ({error.fix}): copy it again, or {ANEW}") from None
    if manifest.tokenizer_fingerprint != tokenizer.fingerprint:
        fix = f"its tokenizer.json is not the one its tokens were made with: bring it back, or {ANEW}"
        raise UserError("path", str(folder), fix)
    return tokenizer


def check_files(folder: StoragePath, shards: Sequence[ShardRecord]) -> None:
    """Raises UserError naming the first file of the shards whose size is not the recorded one."""
    sizes = {} if isinstance(folder, Path) else folder.sizes()
    for record in (record for shard in shards for record in (shard.tokens, shard.documents)):
        path = folder / record.name
        if isinstance(path, Path):
            size = size_of(inside(path)) if path.exists() else None
        else:
            size = sizes.get(record.name)
        if size != record.size:
            what = "is missing" if size is None else f"has {size} bytes instead of {record.size}"
            raise UserError("path", str(path), f"{what}: copy it again, or {ANEW}")


def open_stream(folder: StoragePath, manifest: Manifest, split: str) -> TokenStream:
    """Maps a split's shards. Raises UserError as `check_files` and `verify_small` do, and for a damaged manifest."""
    check_files(folder, manifest.splits.get(split, ()))
    shards = []
    for shard in manifest.splits.get(split, ()):
        counts = shard.token_count * np.dtype(manifest.dtype).itemsize, shard.document_count * 16
        if counts != (shard.tokens.size, shard.documents.size):
            raise UserError("path", str(folder / MANIFEST), f"is damaged (counts and sizes differ): {ANEW}")
        shards.append(
            (
                ArrayFile(folder / shard.tokens.name, manifest.dtype, (shard.token_count,)),
                ArrayFile(folder / shard.documents.name, "<i8", (shard.document_count, 2)),
            )
        )
    verify_small(folder, manifest, split)
    # In an object store the index of a shard is read with the shard's first row, so the recorded sum is used.
    known = None if isinstance(folder, Path) else manifest.total(split, "byte_count")
    return TokenStream(shards, all(shard.exact for shard in manifest.splits.get(split, ())), known)


def verify(folder: str | os.PathLike) -> Manifest:
    """Reads every shard and compares its SHA-256 with the manifest. Raises UserError naming a damaged file."""
    folder = storage_path(folder)
    manifest = read_manifest(folder)
    for split, shards in manifest.splits.items():
        open_stream(folder, manifest, split)
        for record in (r for shard in shards for r in (shard.tokens, shard.documents)):
            with (folder / record.name).open("rb") as file:
                found = file_digest(file, "sha256").hexdigest()
            if found != record.sha256:
                raise _changed(folder / record.name)
    return manifest


def verify_small(folder: StoragePath, manifest: Manifest, split: str) -> None:
    """`verify` for a split of up to `SMALL` bytes on this machine; not repeated as long as its files do not change."""
    records = [record for shard in manifest.splits.get(split, ()) for record in (shard.tokens, shard.documents)]
    if isinstance(folder, Path) and sum(record.size for record in records) <= SMALL:
        for record in records:
            path = inside(folder / record.name)
            stat = path.stat()
            if _hash_of(path, stat.st_mtime_ns, stat.st_size, stat.st_ino) != record.sha256:
                raise _changed(path)


@lru_cache(maxsize=4096)
def _hash_of(path: Path, *state: int) -> str:
    with path.open("rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _changed(path: StoragePath) -> UserError:
    return UserError("path", str(path), f"its content changed since it was prepared: bring it back, or {ANEW}")


@contextmanager
def cannot_write(folder: StoragePath) -> Iterator[None]:
    """Turns the operating system's errors on writing into a UserError that says what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            fix = "the disk is full; free some space and run the same command again: finished shards are kept"
        else:
            fix = f"cannot write here ({error.strerror or error}); choose another folder or fix its permissions"
        raise UserError("out", str(folder), fix) from error


def _with_ends(documents: Sequence[Document], tokenizer: Tokenizer) -> Iterator[np.ndarray]:
    dtype = token_dtype(tokenizer)
    for document in documents:
        ids = np.append(document.ids, np.int32(tokenizer.end_of_text))
        if document.counted is None:
            yield ids.astype(dtype)
        else:
            yield np.where(document.counted, ids, ~ids).astype(COUNTED_TYPE)


def _index(documents: Sequence[Document]) -> Int64[np.ndarray, "documents 2"]:
    ends = np.cumsum([len(d.ids) + 1 for d in documents], dtype="<i8")
    return np.stack([ends, np.array([d.byte_count for d in documents], "<i8")], axis=1)


def _is_exact(documents: Sequence[Document], tokenizer: Tokenizer) -> bool:
    table = tokenizer.token_bytes
    return table is not None and all(int(table[d.ids].sum()) == d.byte_count for d in documents)
