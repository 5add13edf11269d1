"""Paths on this machine (`pathlib.Path`) or in an object store, behind the same few methods.

Arrow, which also reads Parquet here, accesses `gs://` and `s3://`, with credentials and region from the environment as
those clouds document them, and `file://`. fsspec accesses `hf://`, datasets of the Hugging Face hub, also written
`hub:OWNER/NAME`, and `memory://`, which is private to this process.
"""

import itertools
import os
import random
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING
from urllib.parse import quote

import numpy as np

from nagjax.errors import UserError

if TYPE_CHECKING:
    import pyarrow.fs
    from pyarrow import NativeFile

OF_FSSPEC = ("hf", "memory")
SCHEMES = ("gs", "s3", "file", *OF_FSSPEC)
HUB_PREFIX = "hub:"
MOST_LINKS = 8  # to folders, on the path to a file
MOST_ENTERED = 10_000  # links to folders that are followed below one folder: a few that link each other make many paths
TRIES = 5  # of a read; the waits between them add up to half a minute at most


@dataclass(frozen=True)
class RemotePath:
    """A path `scheme://key` in an object store, with the methods of `pathlib.Path` that this package needs. Copies
    carry the name, not the connection.

    The key is not quoted: a space in it is a space, and `%20` in it is these three characters.
    """

    scheme: str
    key: str

    def __str__(self) -> str:
        return f"{self.scheme}://{self.key}"

    as_posix = __str__

    def __truediv__(self, name: str) -> "RemotePath":
        return RemotePath(self.scheme, f"{self.key.rstrip('/')}/{name}")

    def __getstate__(self) -> dict:
        return {"scheme": self.scheme, "key": self.key}

    @property
    def name(self) -> str:
        return PurePosixPath(self.key).name

    @property
    def suffix(self) -> str:
        return PurePosixPath(self.key).suffix

    @property
    def suffixes(self) -> list[str]:
        return PurePosixPath(self.key).suffixes

    @cached_property
    def _store(self) -> "pyarrow.fs.FileSystem":
        from pyarrow import fs

        if self.scheme not in OF_FSSPEC:
            try:
                return fs.FileSystem.from_uri(f"{self.scheme}://{quote(self.key)}")[0]
            except ValueError as error:
                fix = f"names no file or folder ({error}): use gs://BUCKET/NAME, s3://BUCKET/NAME or file:///NAME"
                raise UserError("path", str(self), fix) from None
        try:
            import fsspec

            return fs.PyFileSystem(fs.FSSpecHandler(fsspec.filesystem(self.scheme)))
        except ImportError:
            fix = "needs the packages of the hub: pip install -e '.[hub]'"
            raise UserError("path", str(self), fix) from None

    def _info(self) -> "pyarrow.fs.FileInfo":
        return self._store.get_file_info(self.key)

    def exists(self) -> bool:
        return self.is_file() or self.is_dir()

    def is_file(self) -> bool:
        return self._info().is_file

    def is_dir(self) -> bool:
        return self._info().type.name == "Directory"

    def files(self) -> Iterator["RemotePath"]:
        """All files under the folder."""
        from pyarrow import fs

        for info in self._store.get_file_info(fs.FileSelector(self.key, recursive=True)):
            if info.is_file:
                yield RemotePath(self.scheme, info.path)

    def sizes(self) -> dict[str, int]:
        """The sizes in bytes of the files in the folder, by name, from one listing."""
        from pyarrow import fs

        found = self._store.get_file_info(fs.FileSelector(self.key, allow_not_found=True))
        return {PurePosixPath(info.path).name: info.size for info in found if info.is_file}

    def size(self) -> int:
        return self._info().size

    def changed(self) -> int | str | None:
        """The time of the last change, in nanoseconds, or another mark that changes with the content; None if the store
        has none."""
        if self.scheme not in OF_FSSPEC:
            return self._info().mtime_ns
        known = self._store.handler.fs.info(self.key)
        return next((str(known[mark]) for mark in ("blob_id", "created") if known.get(mark)), None)

    def open(self, mode: str) -> "NativeFile":
        """Opens the file; `mode` is `rb` (random access) or `wb`."""
        return self._store.open_input_file(self.key) if mode == "rb" else self._store.open_output_stream(self.key)

    def read_range(self, start: int | None, stop: int | None) -> bytes:
        """The bytes from `start` to `stop`, or all of them, from a file system of fsspec. Its open files would share
        one position among threads and read ahead by megabytes."""
        return self._store.handler.fs.cat_file(self.key, start, stop, cache_type="none")

    def read_bytes(self) -> bytes:
        if self.scheme in OF_FSSPEC:
            return self.read_range(None, None)
        with self.open("rb") as file:
            return file.read()

    def mkdir(self, parents: bool, exist_ok: bool) -> None:
        if self.scheme == "file":  # object stores have no folders
            self._store.create_dir(self.key, recursive=parents)

    def replace(self, target: "RemotePath") -> None:
        self._store.move(self.key, target.key)

    def unlink(self, missing_ok: bool = False) -> None:
        if not missing_ok or self.is_file():
            self._store.delete_file(self.key)


StoragePath = Path | RemotePath


def storage_path(name: str | os.PathLike | RemotePath, field: str = "path") -> StoragePath:
    """A path of this machine, or the URL of an object store, in which nothing is quoted. Raises UserError for
    `field` for an unknown store."""
    if isinstance(name, RemotePath):
        return name
    if str(name).startswith(HUB_PREFIX):
        place = str(name).removeprefix(HUB_PREFIX).strip("/")
        if "/" not in place:
            raise UserError(field, str(name), "use hub:OWNER/NAME, or hub:OWNER/NAME/FOLDER for a folder in it")
        return RemotePath("hf", f"datasets/{place}")
    scheme, mark, key = str(name).partition("://")
    if not mark:
        return Path(name)
    if scheme not in SCHEMES or not key.strip("/"):
        raise UserError(field, str(name), f"use a path, or a URL of {', '.join(f'{s}://' for s in SCHEMES)}")
    if scheme == "file" and not key.startswith("/"):
        raise UserError(field, str(name), "begin the path at the root: file:///FOLDER, with three slashes")
    return RemotePath(scheme, key.rstrip("/"))


def size_of(path: StoragePath) -> int:
    """The size in bytes. Raises FileNotFoundError for a missing file on this machine."""
    return path.size() if isinstance(path, RemotePath) else path.stat().st_size


@contextmanager
def reached(path: StoragePath, field: str) -> Iterator[None]:
    """Turns the errors of an object store's client, which have many unrelated types, into a UserError of `field`.
    Errors that mean that a file is missing, may not be read, or has a wrong content are left as they are."""
    try:
        yield
    except (UserError, FileNotFoundError, NotADirectoryError, PermissionError, EOFError, ValueError):
        raise
    except Exception as error:
        if not isinstance(path, RemotePath):
            raise
        fix = f"cannot be reached ({type(error).__name__}: {error}): check the name, the network and the credentials"
        raise UserError(field, str(path), fix) from None


def files_under(folder: StoragePath) -> list[tuple[str, StoragePath]]:
    """Every file in a folder and below it, with its relative name, in an order that does not depend on the file system.
    Names that begin with a dot are left out, with everything in such folders. Links are followed; a link that leads
    nowhere counts as a file. Raises OSError for a folder that cannot be read, UserError for too many links to folders.
    """
    if isinstance(folder, RemotePath):
        root = folder.key.strip("/")  # some stores begin the keys of files alone with a slash
        every = ((str(PurePosixPath(p.key.strip("/")).relative_to(root)), p) for p in folder.files())
        found = [(name, p) for name, p in every if "/." not in f"/{name}"]
    else:
        found = [(p.relative_to(folder).as_posix(), p) for p in _walked(folder, (), MOST_LINKS, itertools.count(1))]
    return sorted(found, key=lambda pair: pair[0])


def _walked(folder: Path, above: tuple[Path, ...], links: int, entered: Iterator[int]) -> Iterator[Path]:
    """The files below a folder. A link to a folder that contains it is not entered again, nor is one behind more than
    `links` other links. Pipes and devices are left out, and links to them. `entered` counts the links followed."""
    if (real := folder.resolve()) in above:
        return
    for path in folder.iterdir():
        if path.name.startswith("."):
            continue
        if path.is_dir():
            if (left := links - path.is_symlink()) < 0:
                continue
            if left < links and next(entered) > MOST_ENTERED:
                fix = f"more than {MOST_ENTERED:,} links to folders are followed up to here: name those folders instead"
                raise UserError("inputs", str(path), fix)
            yield from _walked(path, (*above, real), left, entered)
        elif path.is_file() or (path.is_symlink() and not path.exists()):
            yield path


class RemoteArray:
    """A flat array in an object store. `array[start:stop]` reads just those bytes, from any thread; a read that fails
    or returns too few bytes is tried `TRIES` times. Raises UserError of `data.path` if none succeeds."""

    def __init__(self, path: RemotePath, dtype: str):
        self._path, self._dtype = path, np.dtype(dtype)
        self._file = None if path.scheme in OF_FSSPEC else path.open("rb")

    def __getitem__(self, part: slice) -> np.ndarray:
        start, stop = part.start * self._dtype.itemsize, part.stop * self._dtype.itemsize
        with reached(self._path, "data.path"):
            for tried in itertools.count(1):
                try:
                    return np.frombuffer(self._read(start, stop), self._dtype)
                except Exception as error:
                    if tried == TRIES or isinstance(error, FileNotFoundError | PermissionError):
                        raise
                time.sleep(2.0**tried * random.random())  # hosts that failed together retry apart

    def _read(self, start: int, stop: int) -> bytes:
        found = self._path.read_range(start, stop) if self._file is None else self._file.read_at(stop - start, start)
        if len(found) != stop - start:
            raise OSError(f"{len(found)} of the {stop - start} bytes from {start} on")
        return found
