"""What makes a folder of files whole: a seal that names every file in it with its size and SHA-256."""

import concurrent.futures
import json
import os
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

SEAL = "seal.json"
READERS = 4  # files hashed at once; hashing lets go of the interpreter


class Damaged(Exception):
    """A sealed folder is not what was sealed; the message names the file and what is wrong with it."""


def seal(folder: Path, facts: dict[str, Any]) -> None:
    """Writes the seal of all files now in `folder`, with `facts` (JSON values) in it, and puts it all on disk."""
    names = _names(folder)
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda name: _describe(folder / name, sync=True), names)
        body = {"facts": facts, "files": dict(zip(names, found, strict=True))}
    _write(folder, body)
    for path in {folder, *((folder / name).parent for name in names)}:
        sync_folder(path)


def reseal(folder: Path, facts: dict[str, Any]) -> None:
    """Gives a sealed folder other facts. Raises Damaged."""
    _write(folder, _read(folder) | {"facts": facts})


def read_seal(folder: Path) -> dict[str, Any]:
    """The facts of a sealed folder, without reading its files. Raises Damaged."""
    return _read(folder)["facts"]


def verify(folder: Path) -> dict[str, Any]:
    """Reads every sealed file and returns the facts. Raises Damaged naming the first file that is not as sealed."""
    body = _read(folder)
    present = set(_names(folder))
    if missing := sorted(set(body["files"]) - present):
        raise Damaged(f"{missing[0]} is missing")
    names = list(body["files"])
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        for name, problem in zip(
            names, pool.map(lambda name: _problem(folder / name, *body["files"][name]), names), strict=True
        ):
            if problem:
                raise Damaged(f"{name} {problem}")
    return body["facts"]


def write_durably(path: Path, text: str) -> None:
    """The whole new text, on disk when this returns, or the old file untouched."""
    scratch = path.with_name(f"{path.name}.partial")
    with scratch.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    os.replace(scratch, path)
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Makes renames inside `folder` survive a crash of the machine."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _write(folder: Path, body: dict) -> None:
    write_durably(folder / SEAL, json.dumps({**body, "sha256": _digest(body)}, indent=1))


def _names(folder: Path) -> list[str]:
    """Files under the folder, relative; links are not followed, so that nothing outside is read."""
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return sorted(str(path.relative_to(folder)) for path in files if path != folder / SEAL)


def _describe(path: Path, sync: bool = False) -> tuple[int, str]:
    with path.open("rb") as file:
        if sync:
            os.fsync(file.fileno())
        digest = file_digest(file, "sha256").hexdigest()
        return file.tell(), digest


def _problem(path: Path, size: int, digest: str) -> str | None:
    try:
        found, content = _describe(path)
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if found != size:
        return f"has {found} bytes instead of {size}"
    return None if content == digest else "does not have the content that was saved"


def _read(folder: Path) -> dict[str, Any]:
    try:
        body = json.loads((folder / SEAL).read_text(encoding="utf-8"))
        digest = body.pop("sha256")
    except FileNotFoundError:
        raise Damaged(f"{SEAL} is missing") from None
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise Damaged(f"{SEAL} cannot be read ({error})") from None
    if digest != _digest(body):
        raise Damaged(f"{SEAL} does not have the content that was saved")
    return body


def _digest(body: dict) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
