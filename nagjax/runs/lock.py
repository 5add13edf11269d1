"""A lock that allows one writer of a run's folder at a time: training, `--fresh`, and whatever else changes the run.

Between processes of one machine, an operating-system lock on `lock.json` decides; it ends with its process. Between
machines, and on file systems without such locks, the content of the file decides: its writer renews it every `BEAT`
seconds, and a file that was not renewed for `STALE` seconds belongs to nobody. Ages are measured by the file system's
clock and by waiting, never by comparing the clocks of two machines.

Readers take no lock. Whatever writes into a run's folder (a map, a diagnosis, scores of tasks, a calibration) takes it;
while the run trains, maps and diagnoses can be written to another folder. `nagjax data prepare` and `data chat` take a
lock in the corpus's folder.
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

from nagjax.console import note
from nagjax.errors import UserError
from nagjax.files import naming_folder, open_to_change, read_json
from nagjax.json_reader import read
from nagjax.runs.names import CONFIG, LOCK

BEAT, STALE = 20.0, 120.0  # seconds
LOOK = 1.0  # seconds between two checks of another machine's file
WIDTH = 512  # bytes of the file, constant, so that renewing it needs no free disk space
BEGINNING = b'{"pid": '  # of every lock file
NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)  # errors of file systems without locks


class Held(UserError):
    """Another process is writing the folder."""


class WriterLock:
    """Context manager that locks a folder, which it creates if needed; of several hosts only the first locks it.

    `doing` names the command of this process in the error that other processes get. Raises Held if another process
    holds the lock, naming process, machine and start; UserError if the folder cannot be written.
    """

    def __init__(self, folder: str | os.PathLike, doing: str, field: str = "out"):
        self.folder, self.doing, self.field = Path(folder), doing, field
        self.path = self.folder.resolve() / LOCK
        self._file, self._taker, self._closed = None, None, threading.Event()
        self._looked = time.time()  # time.time, because it advances while the machine sleeps
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
        if "jax" in sys.modules:
            from nagjax.train.distributed.consensus import from_first

            from_first(self._acquire)
        else:  # then there is one host, and jax need not be imported
            self._acquire()
        return self

    def __exit__(self, *_):
        if self._file is None:
            return
        self._closed.set()
        self._thread.join()
        if self._taker is None and not self._replaced():
            with contextlib.suppress(OSError):
                self.path.unlink()
        self._file.close()

    def holds(self, run: str) -> None:
        """Records the id of the run in the lock file, too."""
        self._me["run"] = run
        if self._file is not None:
            self._write(self._file)

    @property
    def lost(self) -> bool:
        """Whether another machine has taken over the folder. Cheap enough for every step. It checks the file itself if
        the thread that renews the file has not done so for `STALE` seconds, as in a process that was suspended."""
        if self._file is not None and self._taker is None and time.time() - self._looked > STALE:
            self._look()
        return self._taker is not None

    def check(self) -> None:
        """Raises UserError if the folder is `lost`."""
        if self.lost:
            fix = (
                f"was taken over by {_told(self._taker or {})}, as {LOCK} was not renewed for {STALE:.0f} s (this "
                "process was suspended, or the storage did not answer): nothing more is written"
            )
            raise UserError(self.field, str(self.folder), fix)

    def _acquire(self) -> None:
        with naming_folder(self.folder, self.field):
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
                return  # its last holder has just deleted the file
            if not holder and _foreign(file):
                raise UserError(self.field, str(self.folder), f"its {LOCK} is not nagjax's: choose another folder")
            if holder and not (locked and holder["boot"] == self._me["boot"]) and not self._abandoned(file, holder):
                return
            self._write(file)
            if not locked:
                time.sleep(LOOK)  # a process that found it free at the same time has written by now
            if (holder or not locked) and self._replaced():
                return  # another machine has taken it as well
            self._file = file
            stack.pop_all()

    def _abandoned(self, file, holder: dict) -> bool:
        """Waits until the holder on another machine counts as gone, and returns True; False if the file disappears.
        Raises UserError as soon as the holder renews the file."""
        with tempfile.TemporaryFile(dir=self.path.parent) as probe:
            age = os.fstat(probe.fileno()).st_mtime - os.fstat(file.fileno()).st_mtime
        if age < STALE:
            left = STALE - max(age, 0.0)
            note(f"nagjax: {self.folder} was written by {_told(holder)}; waiting up to {left:.0f} s")
            until = time.monotonic() + left
            while time.monotonic() < until:
                time.sleep(LOOK)
                seen = _read(self.path)
                if seen is None:
                    return False
                if seen != holder:
                    raise self._refusal(seen)
        return True

    def _refusal(self, holder: dict) -> Held:
        where = f"kill {holder['pid']}" if holder.get("boot") == self._me["boot"] else "stop it there"
        fix = f"is being written by {_told(holder)}: wait until it ends, or end it ({where}), or choose another folder"
        return Held(self.field, str(self.folder), fix)

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
                self._look()
                if self._taker is not None:
                    return
                self._write(self._file)

    def _look(self) -> None:
        self._looked = time.time()
        if self._replaced():
            self._taker = _read(self.path) or {}

    def _replaced(self) -> bool:
        """Whether the file now names another holder."""
        holder = _read(self.path)
        return bool(holder) and holder["token"] != self._me["token"]

    def _is(self, file) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file.fileno()), os.lstat(self.path))
        return False


def lock_of_report(folder: str | os.PathLike, doing: str, field: str = "out") -> contextlib.AbstractContextManager:
    """A `WriterLock` if the folder is a run's; otherwise nothing is locked, because reports in other folders have no
    owner."""
    return WriterLock(folder, doing, field) if (Path(folder) / CONFIG).exists() else contextlib.nullcontext()


def _flock(file) -> bool | None:
    """Tries to lock. True: locked. False: another process holds it. None: the file system has no locks."""
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
        return _checked(read(file, largest=4 * WIDTH))
    except ValueError:
        return {}


def _foreign(file) -> bool:
    """Whether a file that names no holder was written by another program. A file that a killed writer or a crashed
    machine left incomplete is not foreign."""
    file.seek(0)
    head = file.read(len(BEGINNING)).rstrip(b"\0")
    return not BEGINNING.startswith(head)


def _read(path: Path) -> dict | None:
    """The holder that the file names, empty if the file is unreadable; None if there is no file."""
    try:
        return _checked(read_json(path, largest=4 * WIDTH))
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
    """The id of this machine's current boot: equal for all its processes, in containers too."""
    with contextlib.suppress(OSError):
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return socket.gethostname()
