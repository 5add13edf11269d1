"""Creates a folder that appears only once it is complete, for import, export and prune."""

import contextlib
import os
from collections.abc import Generator
from pathlib import Path

from nagjax.errors import UserError
from nagjax.files import PARTIAL, check_storable, naming_folder, refuse_link, remove, sync_folder
from nagjax.runs.lock import WriterLock
from nagjax.runs.names import LOCK


def check_free(out: str | os.PathLike) -> None:
    """Raises UserError unless `out` does not exist yet or is an empty folder, in which checkpoints can lie."""
    check_storable(out)
    out = Path(out)
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise UserError("out", str(out), "is not empty: choose another --out, or remove it")
    if out.is_symlink() and not out.exists():
        raise UserError("out", str(out), "is a link to nothing: choose another --out, or remove it")


@contextlib.contextmanager
def new_folder(out: str | os.PathLike, doing: str) -> Generator[Path]:
    """Yields a temporary folder beside `out`, which is renamed to `out` when the `with` block ends. If the block fails,
    the folder is removed; if the process is killed, the next attempt removes it.

    Raises UserError if `out` is in use or cannot be made, or if another process is writing it.
    """
    check_free(out)
    place = Path(out).resolve()
    building = place.with_name(f".{place.name}{PARTIAL}")
    refuse_link(building)
    try:
        with naming_folder(Path(out), "out"):
            building.mkdir(parents=True, exist_ok=True)
        with WriterLock(building, doing):
            _empty(building)
            try:
                yield building
                check_free(out)
                _take_place(building, place)
            except BaseException:
                _empty(building)
                raise
    finally:
        with contextlib.suppress(OSError):
            building.rmdir()


def _take_place(building: Path, place: Path) -> None:
    try:
        sync_folder(building)
        building.rename(place)
        (place / LOCK).unlink(missing_ok=True)
        sync_folder(place.parent)
    except OSError as error:
        fix = f"the finished folder cannot be moved there ({error.strerror}): choose a folder that does not exist yet"
        raise UserError("out", str(place), fix) from None


def _empty(folder: Path) -> None:
    for path in folder.iterdir() if folder.is_dir() else ():
        if path.name != LOCK:
            remove(path)
