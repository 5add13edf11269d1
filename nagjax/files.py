"""Reads and writes files in a folder that somebody else may have made. Nothing is written through a link, no link out
of the folder is followed for reading, and a file is either written completely or not at all."""

import contextlib
import json
import math
import os
import re
import shutil
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from nagjax import json_reader
from nagjax.errors import UserError

PARTIAL = ".partial"
URL = re.compile(r"[a-z][a-z0-9]+:")  # the first part of a URL as a path: Path("gs://a/b") is gs:/a/b
LARGEST = 1 << 30  # bytes of a file that is read as a whole


def inside(path: str | os.PathLike) -> Path:
    """The resolved path of a file or folder. It need not exist; it must lie in the folder that `path` names.

    That folder itself may be a link, because the user named it. Links of a Hugging Face cache, from
    `snapshots/REVISION` to the `blobs` beside it, are allowed, too. Raises UserError for a link that leads elsewhere or
    nowhere, and for anything but a file or folder (reading a pipe could wait forever).
    """
    path = Path(path)
    folder = path.parent.resolve()
    try:
        found = path.resolve()
    except (OSError, RuntimeError):
        raise UserError("file", str(path), "is a link that leads in a circle: remove it") from None
    blobs = [folder.parents[1] / "blobs"] if folder.parent.name == "snapshots" else []
    if not any(found.is_relative_to(allowed) for allowed in (folder, *blobs)):
        fix = f"is a link out of {folder}, which is not followed: put the file itself there, or remove the link"
        raise UserError("file", str(path), fix)
    try:
        mode = found.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        if path.is_symlink():
            raise UserError("file", str(path), "is a link that leads nowhere: remove it") from None
        return found
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise UserError("file", str(path), "is neither a file nor a folder: remove it")
    return found


def what_lacks(folder: str | os.PathLike, name: str) -> str:
    """The words with which a message says that `folder` has no file `name`; they say if the folder itself is
    missing."""
    return f"there is no {name} in it" if Path(folder).is_dir() else "no such folder"


def has_file(path: str | os.PathLike) -> bool:
    """Whether the file exists. Raises UserError as `inside` does."""
    return inside(path).is_file()


def read_bytes(path: str | os.PathLike, *, largest: int = LARGEST) -> bytes:
    """The content of a file. Raises OSError, and UserError as `inside` does and for a file of more than `largest`
    bytes."""
    with inside(path).open("rb") as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise UserError("file", str(path), f"has more than {largest:,} bytes: it is not what its name says")
    return content


def read_json(path: str | os.PathLike, **limits):
    """The JSON value in a file, within the limits of `json_reader.read`. Raises OSError, ValueError as
    `json_reader.read` does, and UserError as `inside` does."""
    with inside(path).open("rb") as file:
        return json_reader.read(file, **limits)


def read_record[T](cls: type[T], path: str | os.PathLike, field: str, fix: str, **options) -> T | None:
    """A dataclass from a JSON file in a run's folder, None if there is no file. `options` are those of
    `json_reader.build`. Raises UserError of `field`, with the file, what is wrong, and `fix`."""
    try:
        return json_reader.build(cls, read_json(path), **options)
    except FileNotFoundError:
        return None
    except UserError as error:
        if error.field == "file":  # for example a link
            raise
        what = str(error)
    except (OSError, ValueError) as error:
        what = error.strerror or str(error) if isinstance(error, OSError) else str(error)
    raise UserError(field, str(path), f"cannot be read ({what}): {fix}")


def refuse_link(path: Path) -> None:
    """Raises UserError if `path` is a link: it is neither written through nor silently replaced."""
    if path.is_symlink():
        raise UserError("file", str(path), "is a link, which is not written through: remove it")


@contextlib.contextmanager
def naming(path: str | os.PathLike) -> Iterator[None]:
    """Adds the name of the file to an OSError (for example of a full disk) that has none."""
    try:
        yield
    except OSError as error:
        if error.filename is not None or error.errno is None:
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(path)) from error


@contextlib.contextmanager
def naming_folder(folder: Path, field: str) -> Iterator[None]:
    """Turns errors of writing to the folder into UserErrors of that field, and refuses a URL."""
    other = "choose another --out" if field == "out" else "choose another folder"
    if URL.fullmatch(folder.parts[0] if folder.parts else ""):
        raise UserError(
            field, str(folder), "is not a folder of a file system: mount the bucket, and give the mounted folder"
        )
    try:
        yield
    except PermissionError:
        raise UserError(field, str(folder), f"no permission to write there; {other}") from None
    except (FileExistsError, NotADirectoryError):
        raise UserError(field, str(folder), f"it or one of its parents is a file; {other}") from None
    except OSError as error:
        fix = f"cannot be written ({os.strerror(error.errno) if error.errno else error}); {other}"
        raise UserError(field, str(folder), fix) from None


def check_storable(folder: str | os.PathLike, field: str = "out") -> None:
    """Raises UserError for a folder in which checkpoints would be lost: their library takes a backslash for a slash."""
    if "\\" in str(Path(folder).resolve()):
        fix = "checkpoints cannot lie in a folder with a backslash in its path: choose another one"
        raise UserError(field, str(folder), fix)


def check_writable(folder: str | os.PathLike, field: str = "out") -> None:
    """Checks, before work whose results go to the folder, that they can be written: makes the folder if necessary, and
    in it a file that is removed again. Raises UserError of `field` if this fails."""
    folder = Path(folder)
    with naming_folder(folder, field):
        folder.mkdir(parents=True, exist_ok=True)
        try_writing(folder)


def check_writable_file(path: str | os.PathLike, field: str = "out") -> None:
    """`check_writable` for a result that is one file. Also raises UserError if a folder or a link is in its place."""
    path = Path(path)
    refuse_link(path)
    if path.is_dir():
        raise UserError(field, str(path), "is a folder: give a file in it")
    check_writable(path.parent, field)


def try_writing(folder: Path) -> None:
    """Makes a file in the folder and removes it again. Raises OSError if this fails."""
    probe = folder / partial_name("probe")
    os.close(create(probe))
    probe.unlink()


def partial_name(name: str) -> str:
    """The name of a file that becomes `name` when it is complete. No other writer, in this process or another, uses
    it."""
    return f"{name}.{os.getpid()}-{uuid.uuid4().hex}{PARTIAL}"


def write_bytes(path: str | os.PathLike, content: bytes) -> None:
    """Replaces the content of a file. Afterwards the whole new content is on disk; on failure the old file is
    untouched. Of several simultaneous writers the last one wins. A writer that is killed may leave a file
    `NAME.PROCESS-....partial`, which nobody reads. Raises OSError with the name of the file, and UserError if a link is
    in its place."""
    path = Path(path)
    refuse_link(path)
    scratch = path.with_name(partial_name(path.name))
    with naming(path):
        try:
            with open(create(scratch), "wb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(scratch, path)
        except OSError:
            with contextlib.suppress(OSError):
                os.unlink(scratch)
            raise
        sync_folder(path.parent)


def write_text(path: str | os.PathLike, text: str) -> None:
    """`write_bytes` of a text in UTF-8; does nothing if the file already holds it."""
    path, content = Path(path), text.encode()
    refuse_link(path)
    with contextlib.suppress(FileNotFoundError):
        if inside(path).stat().st_size == len(content) and path.read_bytes() == content:
            return
    write_bytes(path, content)


def json_text(value: Any, **options: Any) -> str:
    """`json.dumps`, with null for numbers that are not finite, which JSON does not have."""
    return json.dumps(_finite(value), **options)


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def write_json(path: str | os.PathLike, value: Any) -> None:
    """`write_text` of `json_text`, with an indent of 2."""
    write_text(path, json_text(value, indent=2))


def create(path: str | os.PathLike) -> int:
    """The descriptor of a new file. Raises FileExistsError if anything, even a link, is in its place."""
    return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666)


def open_to_change(path: str | os.PathLike) -> BinaryIO:
    """Opens a file to be read and changed in place, and makes it if necessary. Raises OSError, and UserError for a
    link."""
    path = Path(path)
    refuse_link(path)
    inside(path)
    return os.fdopen(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666), "r+b")


def remove(path: Path) -> None:
    """Removes a folder with all its content, a file, or a link (but not its target)."""
    shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def copy(source: Path, target: Path) -> None:
    """Copies a file into another folder. Raises as `inside` and `write_bytes` do."""
    write_bytes(target, read_bytes(source))


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` survive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
