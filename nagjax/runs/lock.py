"""One writer of a run's folder at a time: training, `--fresh`, and whatever else changes what the run is.

A lock of the operating system on `lock.json` decides between processes of one machine; it ends with the process,
however that ends. Between machines, and where the file system has no such locks, the file itself does: its writer
renews it every `BEAT` seconds, and one that was not renewed for `STALE` seconds belongs to nobody. Ages are taken by
the file system's clock and by waiting, never by comparing the clocks of two machines.

Readers take no lock. Nor does a report (a map, a diagnosis, results of tasks): it is written whole, under its own name.
"""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import sys
import tempfile
import threading
import time
import uuid
from pathlib import Path

from nagjax.errors import UserError
from nagjax.files import open_to_change, read_json
from nagjax.runs.names import LOCK
from nagjax.train.distributed.consensus import from_first

BEAT, STALE = 20.0, 120.0  # seconds
LOOK = 1.0  # seconds between two looks at another machine's file
WIDTH = 512  # bytes of the file: renewing it needs no room on the disk
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # of file systems without them


class WriterLock:
    """Holds the folder, which is made if need be, for as long as the context lasts; of several hosts the first does.

    `doing` is what refused processes are told. Raises UserError where somebody else holds it, naming process, machine
    and start, and where the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike, doing: str, field: str = "out"):
        self.folder, self.doing, self.field = Path(folder), doing, field
        self.path = self.folder.resolve() / LOCK
        self._file, self._lost, self._closed = None, None, threading.Event()
        self._writing = threading.Lock()
        self._me = {
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "boot": _boot(),
            "started": _now(),
            "doing": doing,
            "token": uuid.uuid4().hex,
        }

    def __enter__(self):
        from_first(self._acquire)
        return self

    def __exit__(self, *_):
        if self._file is None:
            return
        self._closed.set()
        self._thread.join()
        if self._lost is None and not self._replaced():
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._file.close()

    def holds(self, run: str) -> None:
        """Notes the id of the run in the folder."""
        self._me["run"] = run
        if self._file is not None:
            self._write(self._file)

    def check(self) -> None:
        """Raises UserError where another machine has taken the folder over since (this one having slept, say)."""
        if self._lost is not None:
            fix = f"was taken over while this process stood still, by {_told(self._lost)}: nothing more is written"
            raise UserError(self.field, str(self.folder), fix)

    def _acquire(self) -> None:
        with _said(self.folder, self.field):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            while self._file is None:
                self._attempt()
        self._thread = threading.Thread(target=self._beat, name="lock", daemon=True)
        self._thread.start()

    def _attempt(self) -> None:
        with contextlib.ExitStack() as stack:
            file = stack.enter_context(open_to_change(self.path))
            locked = _flock(file)
            holder = _parsed(file)
            if locked is False:
                raise self._refusal(holder)
            if not self._is(file):
                return  # its last holder has just removed it
            if holder and not (locked and holder["boot"] == self._me["boot"]) and not self._abandoned(file, holder):
                return
            self._write(file)
            if holder and _parsed(file).get("token") != self._me["token"]:
                return  # another machine took it over, too
            self._file = file
            stack.pop_all()

    def _abandoned(self, file, holder: dict) -> bool:
        """Whether the holder on another machine is gone; waits for that. Raises UserError once it has stirred."""
        with tempfile.TemporaryFile(dir=self.path.parent) as probe:
            age = os.fstat(probe.fileno()).st_mtime - os.fstat(file.fileno()).st_mtime
        if age < STALE:
            left = STALE - max(age, 0.0)
            print(f"nagjax: {self.folder} was written by {_told(holder)}; waiting up to {left:.0f} s", file=sys.stderr)
            until = time.monotonic() + left
            while time.monotonic() < until:
                time.sleep(LOOK)
                seen = _read(self.path)
                if seen is None:
                    return False
                if seen != holder:
                    raise self._refusal(seen)
        return True

    def _refusal(self, holder: dict) -> UserError:
        where = f"kill {holder['pid']}" if holder.get("boot") == self._me["boot"] else "stop it there"
        fix = f"is being written by {_told(holder)}: wait until it ends, or end it ({where}), or choose another folder"
        return UserError(self.field, str(self.folder), fix)

    def _write(self, file) -> None:
        with self._writing:
            content = json.dumps({**self._me, "beat": _now()}).encode()
            file.seek(0)
            file.write(content.ljust(WIDTH - 1) + b"\n")
            file.truncate()
            file.flush()
            os.fsync(file.fileno())

    def _beat(self) -> None:
        while not self._closed.wait(BEAT):
            with contextlib.suppress(OSError):
                if self._replaced():
                    self._lost = _read(self.path) or {}
                    return
                self._write(self._file)

    def _replaced(self) -> bool:
        """Whether somebody else's name stands in the file."""
        holder = _read(self.path)
        return bool(holder) and holder["token"] != self._me["token"]

    def _is(self, file) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file.fileno()), os.lstat(self.path))
        return False


def _flock(file) -> bool | None:
    """True: locked. False: another process has it. None: there are no locks here."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno in NO_LOCKS:
            return None
        raise


def _parsed(file) -> dict:
    file.seek(0)
    try:
        return _checked(json.loads(file.read(4 * WIDTH)))
    except (ValueError, RecursionError):
        return {}


def _read(path: Path) -> dict | None:
    """Who holds it; None where the file is gone."""
    try:
        return _checked(read_json(path))
    except FileNotFoundError:
        return None
    except (ValueError, OSError, UserError):
        return {}


def _checked(holder) -> dict:
    known = {"pid": int, "host": str, "boot": str, "started": str, "doing": str, "token": str, "beat": str}
    fine = isinstance(holder, dict) and all(isinstance(holder.get(name), kind) for name, kind in known.items())
    return holder if fine else {}


def _told(holder: dict) -> str:
    if not holder:
        return "another process"
    return f"process {holder['pid']} on {holder['host']} (nagjax {holder['doing']}, since {holder['started']})"


def _now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


def _boot() -> str:
    """Of this machine since it was started: equal for all its processes, in containers too."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()


@contextlib.contextmanager
def _said(folder: Path, field: str):
    """What may be wrong with a folder that is to be written."""
    other = "choose another --out" if field == "out" else "choose another folder"
    try:
        yield
    except PermissionError:
        raise UserError(field, str(folder), f"no permission to write there; {other}") from None
    except (FileExistsError, NotADirectoryError):
        raise UserError(field, str(folder), f"is a file, or lies under one; {other}") from None
    except OSError as error:
        fix = f"cannot be written ({os.strerror(error.errno) if error.errno else error}); {other}"
        raise UserError(field, str(folder), fix) from None
