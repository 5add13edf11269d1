"""The faults, and how each is put into a process that is about to run the training command."""

import errno
import os
import random
import resource
import signal
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

EXIT = {signal.SIGKILL: -signal.SIGKILL, signal.SIGTERM: 0, signal.SIGINT: 130}
REFUSED = 2  # exit code of the command after one line that says what is wrong


@dataclass(frozen=True)
class Kind:
    """A kind of fault: its name in the table, how often it is drawn, and the exit code it must end in.

    With two `hosts`, `places` are the faults of which one, drawn each time, happens to one host, or to `both`.
    """

    name: str
    what: str
    weight: int
    exit_code: int
    hosts: int = 1
    places: tuple[str, ...] = ()
    both: bool = False


ANY_TIME = "kill at any time"
KILLS = ("kill in a step", "kill in a save", "kill in an evaluation", "kill at a file operation", ANY_TIME)
TERMINATIONS = ("terminate in a step", "terminate in a save", "terminate in an evaluation")
KINDS = {
    kind.name: kind
    for kind in (
        Kind("kill in a step", "SIGKILL up to 30 ms after a step was dispatched", 4, -signal.SIGKILL),
        Kind("kill in a save", "SIGKILL up to 150 ms after a save began", 6, -signal.SIGKILL),
        Kind("kill in an evaluation", "SIGKILL after some batch of an evaluation", 3, -signal.SIGKILL),
        Kind("kill at a file operation", "SIGKILL before the n-th open, rename, mkdir or remove", 6, -signal.SIGKILL),
        Kind(ANY_TIME, "SIGKILL from outside at a random time", 5, -signal.SIGKILL),
        Kind("terminate in a step", "SIGTERM: must save and exit 0", 2, 0),
        Kind("terminate in a save", "SIGTERM while a save is being written", 2, 0),
        Kind("terminate in an evaluation", "SIGTERM: the evaluation is made after the resume", 2, 0),
        Kind("interrupt", "SIGINT: must save and exit 130", 1, 130),
        Kind("full disk in a save", "files may not grow beyond 4 KB", 2, REFUSED),
        Kind("no room for a save", "less free space than the state takes", 1, REFUSED),
        Kind("failing save", "the disk reports an error (EIO) while a save is finished in the background", 2, REFUSED),
        Kind("NaN in a batch, once", "policy raise: the command ends, and goes on when the batch is sound", 2, REFUSED),
        Kind("flipped byte", "in a file of the newest checkpoint", 3, REFUSED),
        Kind("truncated file", "of the newest checkpoint", 2, REFUSED),
        Kind("lost file", "of the newest checkpoint", 2, REFUSED),
        Kind("half-written leftovers", "a torn metrics line and a part of a checkpoint lie about", 2, 0),
        Kind("second writer", "the same command, with or without --fresh, while the first one trains", 2, REFUSED),
        Kind("link", "a file of the run, or its newest checkpoint, becomes a link out of the folder", 2, REFUSED),
        Kind("foreign checkpoint", "of another run, or under another step's name", 2, REFUSED),
        Kind("changed corpus", "other text of equal counts, then the same text elsewhere", 1, REFUSED),
        Kind("damaged JSON", "a field or bytes of config, corpus, id, info or a manifest", 4, REFUSED),
        Kind("clock going backwards", "by up to a day, in the midst of the run", 1, 0),
        Kind("slow disk", "every file operation takes up to 30 ms", 1, 0),
        Kind("kill in another command", "SIGKILL in an export, import, pruning or preparation; then again", 3, 0),
        Kind("another mesh", "resumed on two devices, killed there, and finished on one", 2, 0),
        Kind("one of two hosts killed", "any SIGKILL above, to one of them", 4, -signal.SIGKILL, 2, KILLS),
        Kind("two hosts killed", "any SIGKILL above, to each of them", 3, -signal.SIGKILL, 2, KILLS, both=True),
        Kind("one of two hosts terminated", "SIGTERM: both must save and exit 0", 3, 0, 2, TERMINATIONS),
        Kind("failing save on one of two hosts", "both must end", 1, REFUSED, 2, ("failing save",)),
        Kind("NaN on one of two hosts, once", "both must end", 1, REFUSED, 2, ("NaN in a batch, once",)),
    )
}
DAMAGE = ("flipped byte", "truncated file", "lost file")


def draw(rng: random.Random, count: int, hosts: int = 1) -> list[str]:
    """Kinds of `count` faults of so many hosts: each kind in turn by weight, shuffled."""
    pool = [name for name, kind in KINDS.items() if kind.hosts == hosts for _ in range(kind.weight)]
    drawn = []
    while len(drawn) < count:
        drawn += rng.sample(pool, len(pool))
    return drawn[:count]


def arm(kind: str, rng: random.Random, folder: Path) -> None:
    """Prepares this process so that the fault happens in it; `rng` chooses where."""
    if kind in ("kill in a step", "terminate in a step", "interrupt"):
        number = {"k": signal.SIGKILL, "t": signal.SIGTERM, "i": signal.SIGINT}[kind[0]]
        _at_step(rng.randint(1, 14), number, rng.uniform(0, 0.03) if number == signal.SIGKILL else 0.0)
    elif kind in ("kill in a save", "terminate in a save"):
        number = signal.SIGKILL if kind[0] == "k" else signal.SIGTERM
        _at_save(rng.randint(1, 3), number, rng.uniform(0, 0.15))
    elif kind in ("kill in an evaluation", "terminate in an evaluation"):
        _at_evaluated_batch(rng.randint(1, 6), signal.SIGKILL if kind[0] == "k" else signal.SIGTERM)
    elif kind == "kill at a file operation":
        _at_file_operation(rng.randint(1, 150), str(folder))
    elif kind == "full disk in a save":
        _after_setup(lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096)), metrics_too=False)
    elif kind == "no room for a save":
        _no_room()
    elif kind == "failing save":
        _failing_manifest(rng.randint(1, 2))
    elif kind == "NaN in a batch, once":
        poison({rng.randint(0, 30) for _ in range(3)})


def poison(numbers: set[int]) -> None:
    """Makes the weights of these batches NaN, and so their loss and gradient."""
    from nagjax.train.batches import TrainBatches

    take = TrainBatches.take

    def poisoned(self, number):
        batch = dict(take(self, number))
        if number in numbers:
            batch["weights"] = batch["weights"] * float("nan")
        return batch

    TrainBatches.take = poisoned


def _send(number: int) -> None:
    os.kill(os.getpid(), number)


def _later(seconds: float, number: int) -> None:
    if seconds <= 0:
        _send(number)
        return

    def run():
        time.sleep(seconds)
        _send(number)

    threading.Thread(target=run, daemon=True).start()


def _at_step(nth: int, number: int, delay: float) -> None:
    from nagjax.train import loop

    make, count = loop.jit_train_step, 0

    def counted(step):
        def take(*args):
            nonlocal count
            count += 1
            result = step(*args)
            if count == nth:
                _later(delay, number)
            return result

        return take

    loop.jit_train_step = lambda blueprint: counted(make(blueprint))
    loop.VotingStep.__call__ = counted(loop.VotingStep.__call__)


def _at_save(nth: int, number: int, delay: float) -> None:
    from nagjax.train.checkpoint.store import Checkpoints

    save, count = Checkpoints.save, 0

    def watched(self, *args):
        nonlocal count
        count += 1
        if count == nth:
            _later(delay, number)
        save(self, *args)

    Checkpoints.save = watched


def _at_evaluated_batch(nth: int, number: int) -> None:
    from nagjax.train.evaluator import Evaluator

    evaluate, count = Evaluator.__call__, 0

    def watched(self, params, mod, step, stream):
        def counted():
            nonlocal count
            for batch in stream:
                count += 1
                if count == nth:
                    _send(number)
                yield batch

        return evaluate(self, params, mod, step, counted())

    Evaluator.__call__ = watched


def _at_file_operation(nth: int, folder: str) -> None:
    count = 0

    def audit(event, args):
        nonlocal count
        if event in ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir") and str(args[0]).startswith(folder):
            count += 1
            if count == nth:
                _send(signal.SIGKILL)

    sys.addaudithook(audit)


def _after_setup(action, metrics_too: bool) -> None:
    """Runs the action when the first save begins."""
    from nagjax.train.checkpoint.store import Checkpoints

    save = Checkpoints.save

    def watched(self, *args):
        action()
        save(self, *args)

    Checkpoints.save = watched


def _no_room() -> None:
    import shutil

    shutil.disk_usage = lambda path: shutil._ntuple_diskusage(10**9, 10**9 - 1000, 1000)


def _failing_manifest(nth: int) -> None:
    from nagjax.train.checkpoint import store as checkpoint

    write, count = checkpoint.write_manifest, 0

    def failing(*args):
        nonlocal count
        count += 1
        if count == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        write(*args)

    checkpoint.write_manifest = failing


def damage(kind: str, rng: random.Random, checkpoint: Path) -> str:
    """Damages one file of a checkpoint, and returns its name there."""
    files = sorted(path for path in checkpoint.rglob("*") if path.is_file() and path.stat().st_size)
    chosen = rng.choice(files)
    if kind == "lost file":
        chosen.unlink()
    elif kind == "truncated file":
        os.truncate(chosen, rng.randrange(chosen.stat().st_size))
    else:
        content = bytearray(chosen.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        chosen.write_bytes(content)
    return str(chosen.relative_to(checkpoint))


def litter(rng: random.Random, folder: Path) -> None:
    """What a machine that lost power may leave: parts of a checkpoint under scratch names, and a torn metrics line."""
    saves = folder / "checkpoints"
    scratch = saves / f"{rng.randint(50, 60)}{rng.choice(['.saving', '.saving.orbax-checkpoint-tmp', '.deleting'])}"
    scratch.mkdir(parents=True, exist_ok=True)
    (scratch / "manifest.ocdbt").write_bytes(rng.randbytes(40))
    metrics = folder / "metrics.jsonl"
    if metrics.exists():
        with metrics.open("ab") as file:
            file.write(b'{"kind": "train", "step": 3' + rng.randbytes(5).replace(b"\n", b""))
