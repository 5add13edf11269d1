"""A corpus that every machine has: the source code of the running Python's standard library."""

import functools
import os
import shutil
import sys
import sysconfig
import tempfile
from hashlib import sha256
from pathlib import Path

from nagjax.data.documents import split_name
from nagjax.data.encode import encode_documents
from nagjax.data.store import (
    MANIFEST,
    SPLITS,
    Document,
    in_memory,
    open_stream,
    read_manifest,
    write_manifest,
    write_shard,
)
from nagjax.data.stream import TokenStream
from nagjax.data.tokenizer import Tokenizer
from nagjax.errors import UserError

STDLIB = "stdlib"
VALIDATION = 1 / 20

# Installed packages are not part of the library; tests, codec tables and the help topics are mostly data.
_SKIPPED_FOLDERS = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
    "__pycache__",
}
_SKIPPED_PREFIX = "_sysconfigdata"  # this build's own settings, which differ on every machine


def stdlib_documents(root: str | os.PathLike | None = None) -> list[str]:
    """The library's modules, each once, ordered by the SHA-256 of their text.

    That order is the same for any file system and scatters neighbouring modules, so the first documents of
    either split are a fair sample. Line ends become "\\n". A process reads them once and keeps them (9 MiB). Raises
    UserError where the sources are not there.
    """
    return list(_read(str(root or sysconfig.get_paths()["stdlib"])))


@functools.lru_cache(1)
def _read(root: str) -> tuple[str, ...]:
    by_hash = {}
    for folder, inside, files in os.walk(root):
        inside[:] = [name for name in inside if name not in _SKIPPED_FOLDERS]
        for name in files:
            if name.endswith(".py") and not name.startswith(_SKIPPED_PREFIX):
                try:
                    content = Path(folder, name).read_bytes().replace(b"\r\n", b"\n")
                    text = content.decode()
                except (OSError, UnicodeDecodeError):
                    continue
                if text:
                    by_hash[sha256(content).digest()] = text
    if not by_hash:
        fix = f"the standard library's sources are not in {root}; prepare a corpus and give its folder"
        raise UserError("path", STDLIB, fix)
    return tuple(by_hash[digest] for digest in sorted(by_hash))


@functools.lru_cache(1)
def _content(texts: tuple[str, ...]) -> str:
    return sha256(b"".join(sha256(text.encode()).digest() for text in texts)).hexdigest()


def training_documents() -> list[str]:
    """The modules of `stdlib_documents` that are not held out for validation."""
    return [text for text in stdlib_documents() if split_name(text, VALIDATION) == "train"]


def cache_root() -> Path | None:
    """`$XDG_CACHE_HOME/nagjax`, or `~/.cache/nagjax`, or a temporary folder for a user without a home; None where that
    is another user's, for all may write there."""
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "nagjax"
    except RuntimeError:
        own = Path(tempfile.gettempdir()) / f"nagjax-{os.getuid()}"
        return None if os.path.lexists(own) and own.lstat().st_uid != os.getuid() else own


def open_stdlib(split: str, tokenizer: Tokenizer) -> tuple[TokenStream, str]:
    """A split of the library as tokens, and a hash of the content of both splits and the tokenizer.

    The tokens are cached in a folder named by interpreter version, tokenizer and content. Damaged files are made again;
    if the folder cannot be written, or is another user's, the tokens are made in memory.
    """
    texts = stdlib_documents()
    content = _content(tuple(texts))
    identity = sha256(f"{content} {VALIDATION} {tokenizer.fingerprint}".encode()).hexdigest()
    version = "{}.{}.{}".format(*sys.version_info[:3])
    root = cache_root()
    folder = None if root is None else root / f"stdlib-{version}-{tokenizer.fingerprint[:16]}-{content[:16]}"
    if (stream := _cached(folder, split)) is not None:
        return stream, identity
    by_split = {name: [] for name in SPLITS}
    labelled = ((text, split_name(text, VALIDATION)) for text in texts)
    for split_of_text, document in encode_documents(labelled, tokenizer):
        by_split[split_of_text].append(document)
    if folder is not None:
        _fill_cache(folder, by_split, tokenizer)
    stream = _cached(folder, split)
    return in_memory(by_split[split], tokenizer) if stream is None else stream, identity


def _cached(folder: Path | None, split: str) -> TokenStream | None:
    try:
        return None if folder is None else open_stream(folder, read_manifest(folder), split)
    except (OSError, UserError):
        return None


def _fill_cache(folder: Path, by_split: dict[str, list[Document]], tokenizer: Tokenizer) -> None:
    """Builds the files in a temporary folder and renames it, so that other processes see all of them or none. A damaged
    folder is repaired file by file, because other processes may be about to map its files, whose names must never be
    absent."""
    building = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        building = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        splits = {n: [write_shard(building, n, 0, docs, tokenizer)] for n, docs in by_split.items() if docs}
        write_manifest(building, tokenizer, {"inputs": [STDLIB], "validation": VALIDATION}, splits)
        try:
            building.rename(folder)
        except OSError:  # a folder is there: damaged, or made by another process in the meantime
            if any(_cached(folder, split) is None for split in SPLITS):
                for made in sorted(building.iterdir(), key=lambda path: path.name == MANIFEST):
                    made.replace(folder / made.name)
    except (OSError, UserError):
        pass  # without a cache the result is the same
    finally:
        if building is not None:
            shutil.rmtree(building, ignore_errors=True)
