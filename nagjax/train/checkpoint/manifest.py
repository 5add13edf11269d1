"""The manifest of a folder names every file in it with its size and SHA-256, so that damage and missing files show."""

import concurrent.futures
import contextlib
import dataclasses
import json
import os
from hashlib import file_digest, sha256
from pathlib import Path
from typing import Any

from nagjax.errors import UserError
from nagjax.files import read_json, sync_folder, write_bytes
from nagjax.json_reader import build
from nagjax.runs.names import MANIFEST, SEAL

READERS = 4  # files hashed at once, in threads: hashing releases the interpreter's lock


@dataclasses.dataclass(frozen=True)
class _Body:
    facts: dict
    files: dict[str, list]
    sha256: str
    owner: Any = None  # a dict; versions before it was one stored the step alone


class Damaged(Exception):
    """A folder is not what its manifest says; the message names the file and what is wrong with it."""


def write_manifest(folder: Path, facts: dict[str, Any], owner: dict[str, Any] | None = None) -> None:
    """Writes the manifest of all files now in `folder` and syncs all of it to disk. The manifest also holds `facts` and
    `owner`, the run that the folder belongs to (both JSON values)."""
    names = _names(folder)
    with concurrent.futures.ThreadPoolExecutor(READERS) as pool:
        found = pool.map(lambda name: _describe(folder / name, sync=True), names)
        body = {"owner": owner or {}, "facts": facts, "files": dict(zip(names, found, strict=True))}
    _write(folder, body)
    for path in {folder, *((folder / name).parent for name in names)}:
        sync_folder(path)


def write_facts(folder: Path, facts: dict[str, Any]) -> None:
    """Replaces the facts in the manifest of a complete folder. Raises Damaged."""
    _write(folder, _read(folder) | {"facts": facts})


def read_manifest(folder: Path) -> dict[str, Any]:
    """The `facts` and `owner` in a manifest (`owner` is empty in older ones), without reading the files. Raises
    Damaged."""
    body = _read(folder)
    return {"facts": body["facts"], "owner": body.get("owner", {})}


def verify(folder: Path) -> dict[str, Any]:
    """Reads every file and returns the manifest's facts. Raises Damaged naming the first file that differs from the
    manifest."""
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


def _write(folder: Path, body: dict) -> None:
    text = json.dumps({**body, "sha256": _digest(body)}, indent=1)
    write_bytes(folder / MANIFEST, text.encode())
    with contextlib.suppress(FileNotFoundError):
        (folder / SEAL).unlink()


def _names(folder: Path) -> list[str]:
    """The files under the folder, as relative paths. Links are not followed, so that nothing outside is read."""
    found, own = [], {folder / MANIFEST, folder / SEAL}
    for parent, _, files in os.walk(folder):  # os.walk does not enter links to folders
        paths = (Path(parent, name) for name in files)
        found += [str(p.relative_to(folder)) for p in paths if p.is_file() and not p.is_symlink() and p not in own]
    return sorted(found)


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
    name = SEAL if not os.path.lexists(folder / MANIFEST) and os.path.lexists(folder / SEAL) else MANIFEST
    try:
        body = read_json(folder / name, lenient=True)  # lenient: a score is NaN where the loss was
        found = build(_Body, body)
    except FileNotFoundError:
        raise Damaged(f"{name} is missing") from None
    except (OSError, ValueError, UserError) as error:
        raise Damaged(f"{name} cannot be read ({error})") from None
    del body["sha256"]
    if found.sha256 != _digest(body):
        raise Damaged(f"{name} does not have the content that was saved")
    for file, described in found.files.items():
        if Path(file).is_absolute() or ".." in Path(file).parts or [*map(type, described)] != [int, str]:
            raise Damaged(f"{name} does not describe {file!r} as a file of its folder")
    return body


def _digest(body: dict) -> str:
    return sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
