"""One configuration trained once without faults, and again and again with them; both must end the same."""

import contextlib
import fcntl
import gc
import hashlib
import os
import random
import select
import shutil
import signal
import sys
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from nagjax.runs.names import MANIFEST
from tests.torture import faults, trust

STEPS, SAVE_EVERY, EVAL_EVERY = 40, 5, 8
TINY = f"--depth 2 --width 16 --context 16 --batch 4 --eval-batches 2 --mesh.data 1 --dtype float32 --steps {STEPS} "
TINY += f"--save-every {SAVE_EVERY} --eval-every {EVAL_EVERY} --keep-best 1"
TOOK = "seconds from the signal to the exit: "

LIMIT = 300.0  # seconds after which a process counts as hanging


@dataclass(frozen=True)
class Variant:
    """A configuration under torture; `poison` are batches that are bad whenever they are taken."""

    name: str
    options: tuple[str, ...]
    poison: tuple[int, ...] = ()
    hosts: int = 1


@dataclass
class Tally:
    """What was injected, and the outcomes."""

    injected: dict[str, int] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    finished: int = 0
    processes: int = 0
    grace: float = 0.0  # longest time from SIGTERM to the exit

    def count(self, kind: str) -> None:
        self.injected[kind] = self.injected.get(kind, 0) + 1


class Process(NamedTuple):
    """A running command, and the pipe from which its output is read."""

    pid: int
    output: int


class Lost(Exception):
    """A condition that must hold after a fault does not hold."""


class History:
    last = STEPS

    def __init__(self, variant: Variant, corpus: Path, folder: Path, seed: int):
        self.variant, self.corpus, self.folder, self.seed = variant, corpus, folder, seed
        self.rng = random.Random(f"{seed} {variant.name}")
        self.tally = Tally()
        self.run, self.said = folder / "run", ""

    # ---- processes

    def argv(self, out: Path, *more: str) -> list[str]:
        return [
            "train",
            *TINY.split(),
            *self.variant.options,
            "--data.path",
            str(self.corpus),
            "--out",
            str(out),
            *more,
        ]

    def command(self, argv: list[str], prepare=lambda: None, kill_after: float | None = None) -> tuple[int, float]:
        """Runs the command in a fork of this process, which has imported everything and used nothing.

        Returns the exit code (minus the signal that ended it) and the seconds it took after its training began.
        """
        process = self.begin(argv, prepare)
        began = time.monotonic()
        if kill_after is not None:
            time.sleep(kill_after)
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        return self.end(process), time.monotonic() - began

    def begin(self, argv: list[str], prepare=lambda: None) -> "Process":
        """Runs the command in a fork and returns when its training has begun (or the process has ended)."""
        self.tally.processes += 1
        begun, begin = os.pipe()
        output, sink = os.pipe()  # not a file: its size may be limited
        fcntl.fcntl(output, fcntl.F_SETPIPE_SZ, 1 << 20)
        gc.freeze()
        pid = os.fork()
        if pid == 0:
            run_in_fork(argv, sink, self.variant.poison, prepare, begin)
        os.close(begin)
        os.close(sink)
        with open(begun, "rb") as begun:
            select.select([begun], [], [], LIMIT)
        return Process(pid, output)

    def end(self, process: "Process") -> int:
        """Waits for it, and returns its exit code (minus the signal that ended it)."""
        with open(process.output, "rb") as output:
            code = wait(process.pid, LIMIT)
            self.said = output.read().decode(errors="replace")
        return code

    def steps(self) -> list[int]:
        return _steps(self.run)

    def records(self) -> list[dict]:
        return read_metrics(self.run)

    def lost(self, what: str) -> None:
        raise Lost(what)

    # ---- the history

    def play(self, kinds: list[str]) -> Tally:
        """Injects all of the faults, whatever number of runs that takes, and finishes the last run."""
        reference = self.folder / "reference"
        code, self.seconds = self.command(self.argv(reference))
        if code:
            raise SystemExit(f"{self.variant.name}: the run without faults ended with {code}:\n{self.said}")
        self.metrics, self.digest = read_metrics(reference), self.digest_of(reference)
        self.check_reference()
        for kind in [*kinds, None]:
            try:
                self.finish() if kind is None else self.inject(kind)
            except Lost as lost:
                where = f"{self.variant.name}, seed {self.seed}, fault {sum(self.tally.injected.values()) + 1} ({kind})"
                self.tally.problems.append(f"{where}: {lost}")
                self.run.rename(self.folder / f"problem-{len(self.tally.problems)}")
            if kind is not None:
                self.tally.count(kind)
        return self.tally

    def inject(self, kind: str) -> None:
        """One fault, in this run or, if it ends before the fault could happen, in the next."""
        for _ in range(20):
            if self.attempt(kind):
                return
        raise Lost("could not be injected")

    def attempt(self, kind: str) -> bool:
        if kind in faults.DAMAGE:
            self.damage(kind)
            return True
        if kind in trust.ATTACKS:
            trust.ATTACKS[kind](self)
            return True
        if kind == "half-written leftovers":
            faults.litter(self.rng, self.run)
            self.finish()
            return True
        before = _whole(self.run)
        code = self.start(kind, random.Random(self.rng.random()))
        expected = faults.KINDS[kind].exit_code
        if code == 0 and "finished: " in self.said:
            self.compare()  # the run ended first
            return False
        if code != expected:
            raise Lost(f"exit code {code} instead of {expected}:\n{self.said[-2000:]}")
        if expected == 0:
            self.tally.grace = max(self.tally.grace, float(self.said.rpartition(TOOK)[2].split()[0]))
        if expected == faults.REFUSED:
            self.refused(before)
        # The line of a bad step goes when the run goes on or back; what must stay of such lines `compare` sees.
        written, wanted = (_without_bad(records) for records in (read_metrics(self.run), self.metrics))
        if written != wanted[: len(written)]:
            raise Lost("metrics that the unbroken run does not have")
        return True

    def start(self, kind: str, rng: random.Random) -> int:
        """The command with a fault in it; its exit code."""
        kill_after = rng.uniform(0, 1.1 * self.seconds) if kind == faults.ANY_TIME else None
        return self.command(self.argv(self.run), lambda: faults.arm(kind, rng, self.run), kill_after)[0]

    def damage(self, kind: str) -> None:
        """The command must refuse a damaged newest checkpoint by name, and go on from the one before if told to."""
        while len(_steps(self.run)) < 2 or _steps(self.run)[-1] == STEPS:
            self.attempt("terminate in a step")
        newest = self.run / "checkpoints" / str(_steps(self.run)[-1])
        name = faults.damage(kind, self.rng, newest)
        before = _whole(self.run)
        code, _ = self.command(self.argv(self.run))
        if code != faults.REFUSED or not all(word in self.said for word in (str(newest), name, "--resume=previous")):
            raise Lost(f"{newest.name}/{name} was not refused (exit code {code}):\n{self.said[-2000:]}")
        if _whole(self.run) != before:
            raise Lost("the refusal changed the checkpoints")
        code, _ = self.command(self.argv(self.run, "--resume", "previous"))
        if code or f"checkpoint {newest} is damaged and skipped: {name}" not in self.said:
            raise Lost(f"--resume previous ended with {code}:\n{self.said[-2000:]}")
        self.compare()

    def finish(self) -> None:
        code, _ = self.command(self.argv(self.run))
        if code:
            raise Lost(f"the run did not finish (exit code {code}):\n{self.said[-2000:]}")
        self.compare()

    # ---- what must hold

    def check_reference(self) -> None:
        """Checks the run without faults; here there is nothing to check."""

    def compare(self) -> None:
        """A finished run must equal the unbroken one; the next fault starts a new one."""
        if read_metrics(self.run) != self.metrics:
            raise Lost("other metrics than the unbroken run")
        if self.digest_of(self.run) != self.digest:
            raise Lost("another state than the unbroken run")
        self.tally.finished += 1
        shutil.rmtree(self.run)

    def refused(self, before: dict) -> None:
        """One line says what is wrong; every checkpoint there was is as it was, or was replaced by newer ones."""
        lines = self.said.strip().splitlines()
        # After a failed write orbax closes its event loop, and tensorstore complains on stderr about writes that end
        # later; that noise comes from their threads and cannot be caught.
        ours = [line for line in lines if 'File "' in line and "asyncio" not in line]
        if not lines[-1].startswith("nagjax: error: ") or ours:
            raise Lost(f"not one line: {self.said[-2000:]}")
        after = _whole(self.run)
        if before and not after:
            raise Lost("no checkpoint is left")
        changed = [name for name in before.keys() & after.keys() if before[name] != after[name]]
        for name in changed:
            if not name.endswith(MANIFEST):  # an evaluation made after the save is noted there
                raise Lost(f"{name} was changed")
            _verify((self.run / name).parent)

    def digest_of(self, run: Path) -> str:
        """SHA-256 of every array of the newest checkpoint, read in a process of its own."""
        out = self.folder / "digest.txt"
        out.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                out.write_text(_digest(run / "checkpoints"))
                code = 0
            finally:
                os._exit(code)
        wait(pid, LIMIT)
        return out.read_text() if out.exists() else "unreadable"


def run_in_fork(argv, sink: int, poison, prepare, begin: int) -> None:
    """In the fork: output goes to the sink, the fault is armed, the command runs; never returns."""
    code = 1
    try:
        os.dup2(sink, 1)
        os.dup2(sink, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        from nagjax.cli import main
        from nagjax.train.loop import Loop
        from nagjax.train.safety.stop import Stopper

        go, note = Loop.go, Stopper._note

        def going(self):
            os.write(begin, b"!")
            go(self)

        def noting(self, number, frame):
            noting.at = time.monotonic()
            note(self, number, frame)

        noting.at = None
        Loop.go, Stopper._note = going, noting
        if poison:
            faults.poison(set(poison))
        prepare()
        code = main(argv)
        if noting.at is not None:
            print(f"{TOOK}{time.monotonic() - noting.at:.3f}", file=sys.stderr)
        leave_the_others()
    except BaseException as error:  # noqa: BLE001 - the fork must not return into its parent's code
        import traceback

        traceback.print_exception(error)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def leave_the_others() -> None:
    """Does what the interpreter's exit would do, because the fork ends without one."""
    import jax

    if jax.distributed.is_initialized():
        jax.distributed.shutdown()


def wait(pid: int, limit: float) -> int:
    deadline = time.monotonic() + limit
    while True:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return 124
        time.sleep(0.005)


def _digest(folder: Path) -> str:
    import logging

    import jax
    import numpy as np
    from orbax.checkpoint import v1 as ocp

    logging.disable(logging.ERROR)  # that the arrays of two hosts are read by one
    newest = max(int(path.name) for path in folder.iterdir() if path.name.isdigit())
    warnings.simplefilter("ignore")  # that the arrays go where they were
    leaves = jax.tree_util.tree_leaves_with_path(ocp.load(folder / str(newest)))
    digest = hashlib.sha256(str(newest).encode())
    for path, leaf in leaves:
        array = np.asarray(leaf)
        digest.update(f"{jax.tree_util.keystr(path)} {array.dtype} {array.shape}".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def read_metrics(run: Path) -> list[dict]:
    from nagjax.runs.metrics import comparable

    path = run / "metrics.jsonl"
    if not path.exists():
        return []
    whole, _, _ = path.read_bytes().rpartition(b"\n")  # the last line may be torn
    scratch = path.with_name("whole.jsonl")
    scratch.write_bytes(whole)
    try:
        return comparable(scratch)
    finally:
        scratch.unlink()


def _without_bad(records: list[dict]) -> list[dict]:
    return [record for record in records if not record.get("skipped")]


def _verify(checkpoint: Path) -> None:
    from nagjax.train.checkpoint import manifest

    try:
        manifest.verify(checkpoint)
    except manifest.Damaged as damage:
        raise Lost(f"{checkpoint} is damaged: {damage}") from damage


def _steps(run: Path) -> list[int]:
    from nagjax.train.checkpoint.store import steps_saved

    return steps_saved(run / "checkpoints")


def _whole(run: Path) -> dict[str, str]:
    """Content of every complete checkpoint, by file."""
    found = {}
    for step in _steps(run):
        for path in sorted((run / "checkpoints" / str(step)).rglob("*")):
            if path.is_file():
                found[str(path.relative_to(run))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return found
