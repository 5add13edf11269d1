"""Damages one file after the other, runs each verb that reads it, and records the outcome."""

import random
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tests.fuzz.mutations import mutate
from tests.fuzz.world import Target, quietly

LIMIT = 60  # seconds that one verb may take
MOST = 1 << 20  # KiB by which one verb may raise the memory ever used
ROOM = 14 << 30  # bytes of addresses; a file of 8 GiB is mapped
LINE = 2100  # characters


class TooLong(BaseException):
    pass


@dataclass
class Outcome:
    """The outcome of the mutations of one file of one target."""

    refused: int = 0
    accepted: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, other: "Outcome") -> None:
        self.refused += other.refused
        self.accepted += other.accepted
        self.failures += other.failures


def walk(targets: list[Target], numbers: Iterable[int], seed: int, scratch: Path, tell=lambda text: None) -> dict:
    """Runs mutations by number, in turn over the kinds of files of all targets; returns outcomes by target and kind."""
    found: dict[tuple[str, str], Outcome] = {}
    files: dict[tuple[str, str], list[tuple[Target, str]]] = {}
    for target in targets:
        for name in target.files():
            files.setdefault((target.name, _kind(name)), []).append((target, name))
    kinds = random.Random(seed).sample(sorted(files), len(files))
    for count, number in enumerate(numbers):
        kind, rng = kinds[number % len(kinds)], random.Random(f"{seed} {number}")
        target, name = rng.choice(files[kind])
        outcome = found.setdefault(kind, Outcome())
        verb = rng.choice(target.readers(name))
        if count and not count % 100:
            tell(f"{count} mutations")
        code, problem = once(target, name, verb, rng, scratch)
        if problem:
            outcome.failures.append(f"{target.name}, {name}, {verb}, mutation {number} of seed {seed}: {problem}")
            tell(outcome.failures[-1])
        elif code:
            outcome.refused += 1
        else:
            outcome.accepted += 1
    return found


def _kind(name: str) -> str:
    """Files whose names differ only in a number are of one kind."""
    parts = Path(name).parts
    if parts[0] == "checkpoints" and parts[-1] != "manifest.json":
        return "checkpoints/N/..."
    shown = ["N" if part.isdigit() else part for part in parts]
    stem, dot, suffix = shown[-1].rpartition(".")
    return "/".join([*shown[:-1], "".join("N" if c.isdigit() else c for c in stem) + dot + suffix])


def once(
    target: Target, name: str, verb: str, rng: random.Random, scratch: Path, damage: Callable = mutate
) -> tuple[int, str]:
    """One mutation under one verb: its exit code, and what is wrong with how it ended."""
    place = scratch / "walk"
    shutil.rmtree(place, ignore_errors=True)
    folder, out = place / "damaged" / target.folder.name, place / "out"
    shutil.copytree(target.folder, folder, symlinks=True)
    out.mkdir()
    how = damage(rng, folder / name)
    began, before = time.monotonic(), _memory()
    room = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (ROOM, room[1]))  # a decompression bomb must not exhaust the machine
    old = signal.signal(signal.SIGALRM, _alarm)
    signal.alarm(LIMIT)
    try:
        code, said = quietly(lambda: target.verbs[verb](folder, out))
    except TooLong:
        return 0, f"{how}: still running after {LIMIT} s"
    except BaseException:
        return 0, f"{how}: {traceback.format_exc(limit=-4)}"
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, room)
        signal.signal(signal.SIGALRM, old)
    lines = [line for line in said.splitlines() if line.startswith("nagjax: error: ")]
    if code not in (0, 2):
        return code, f"{how}: exit code {code}: {said[-500:]}"
    if code == 2 and (len(lines) != 1 or len(lines[0]) > LINE or "Traceback" in said):
        return code, f"{how}: {len(lines)} lines: {said[-1500:]}"
    if _memory() - before > MOST:
        return code, f"{how}: {(_memory() - before) >> 10} MiB more than before, in {time.monotonic() - began:.0f} s"
    return code, ""


def _alarm(*_):
    raise TooLong


def _memory() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


HEAD = """# Damaged files, and what reads them

Written by `make fuzz`; do not edit. {total:,} mutations in {minutes:.0f} minutes (seed {seed}, {date},
commit {commit}).

Every kind of file that a command reads is damaged at random, one change at a time. In JSON a field is left out,
doubled, or replaced by values of other types and sizes, by NaN, or by values nested 60,000 deep. In safetensors the
change is in the header, its length, or the weights. In all of them bytes are changed, lost and added. The file is also
lost, made unreadable, or becomes a folder, a link, a pipe or, where it is not a text, 8 GiB of zeros.

Then a command that reads it runs, in the same process as the commands before it. It must end with code 2 and one line,
or with code 0 if the change means nothing (a note, white space) or gives another valid value (a smaller seed).
*Anything else* is a traceback, another code, more than {limit} seconds, or a gigabyte of memory more.

"""


def page(found: dict, seed: int, seconds: float) -> str:
    """The page that `make fuzz` writes into the docs."""
    from pallas_kernels.origin import commit

    total = sum(o.refused + o.accepted + len(o.failures) for o in found.values())
    date = time.strftime("%Y-%m-%d", time.gmtime())
    head = HEAD.format(total=total, minutes=seconds / 60, seed=seed, date=date, commit=commit(), limit=LIMIT)
    return head + table(found)


def table(found: dict) -> str:
    """Markdown: file, mutations, outcomes."""
    total = sum(o.refused + o.accepted + len(o.failures) for o in found.values())
    text = "| folder | file | mutations | refused in one line, code 2 | read all the same, code 0 | anything else |\n"
    text += "|---|---|---:|---:|---:|---:|\n"
    for (target, name), one in sorted(found.items()):
        count = one.refused + one.accepted + len(one.failures)
        text += f"| {target} | {name} | {count} | {one.refused} | {one.accepted} | {len(one.failures)} |\n"
    refused, accepted = sum(o.refused for o in found.values()), sum(o.accepted for o in found.values())
    text += f"| all | | {total} | {refused} | {accepted} | {total - refused - accepted} |\n"
    return text
