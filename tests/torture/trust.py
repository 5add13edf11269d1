"""Faults of the folder, not of the process: another writer, links, foreign checkpoints, another corpus. The command
must refuse each in one line, change nothing, and go on as before when the cause is gone."""

import itertools
import json
import random
import shutil
import signal
import sys
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

from nagjax.runs import names
from tests.torture import faults
from tests.torture.mesh import other_losses, two_devices

DAMAGED = (names.CONFIG, names.CORPUS, names.IDENTITY, names.INFO)
LINKED = (names.METRICS, names.CONFIG, names.CORPUS, names.IDENTITY, names.INFO)


def under_way(history) -> int:
    """Trains until the run has a checkpoint and is not finished; returns the step of the newest one."""
    while not (steps := history.steps()) or steps[-1] == history.last:
        history.attempt("terminate in a step")
    return steps[-1]


def refused(history, words: str, *more: str) -> None:
    """The command must end with code 2 and these words, everything being as it was."""
    before = everything(history.run)
    code, _ = history.command(history.argv(history.run, *more))
    if code != faults.REFUSED or words not in history.said or "Traceback" in history.said:
        history.lost(f"exit code {code} instead of a refusal with {words!r}:\n{history.said[-2000:]}")
    if everything(history.run) != before:
        history.lost(f"the refusal with {words!r} changed the folder")


def everything(run: Path) -> dict[str, str]:
    """Content by name, links as such; not the lock, which comes and goes, nor what a killed save has left, which any
    start removes."""
    found = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
        if name.startswith(f"{names.CHECKPOINTS}/") and "." in Path(name).parts[1]:
            continue
        if path.is_symlink():
            found[name] = f"link to {path.readlink()}"
        elif path.is_file() and path.name != names.LOCK:
            found[name] = sha256(path.read_bytes()).hexdigest()
    return found


def second_writer(history) -> None:
    """The same command, with or without --fresh, while the first one trains."""
    fresh = history.rng.random() < 0.5
    first = history.begin(history.argv(history.run))
    time.sleep(history.rng.uniform(0, 0.2))
    code, _ = history.command(history.argv(history.run, *(["--fresh"] if fresh else [])))
    said, first_code = history.said, history.end(first)
    if first_code:
        history.lost(f"the first writer ended with {first_code}:\n{history.said[-2000:]}")
    if code == 0 and "finished: " in said and not fresh:
        pass  # the first one had ended
    elif code == 0 and fresh and f"deletes in {history.run}" in said:
        pass  # it had ended, and this began anew and finished
    elif code != faults.REFUSED or "is being written by process" not in said:
        history.lost(f"the second writer ended with {code}:\n{said[-2000:]}")
    history.compare()


def link(history) -> None:
    """A file of the run, or its newest checkpoint, becomes a link out of the folder."""
    step = under_way(history)
    name = history.rng.choice([*LINKED, f"{names.CHECKPOINTS}/{step}"])
    path, outside = history.run / name, history.folder / "outside"
    path.rename(outside)
    path.symlink_to(outside)
    before = everything(outside) if outside.is_dir() else outside.read_bytes()
    refused(history, "is a link")
    if before != (everything(outside) if outside.is_dir() else outside.read_bytes()):
        history.lost(f"what {name} led to was changed")
    path.unlink()
    outside.rename(path)
    history.finish()


def foreign(history) -> None:
    """A checkpoint of another run, or one under another step's name."""
    step = under_way(history)
    saves = history.run / names.CHECKPOINTS
    if history.rng.random() < 0.5:
        shutil.copytree(history.folder / "reference" / names.CHECKPOINTS / str(history.last), saves / str(history.last))
        refused(history, "is of another run")
        shutil.rmtree(saves / str(history.last))
    else:
        (saves / str(step)).rename(saves / str(step + 1))
        refused(history, f"is of step {step}")
        (saves / str(step + 1)).rename(saves / str(step))
    history.finish()


def other_corpus(history) -> None:
    """Other text of equal counts is refused; the same text elsewhere is not."""
    under_way(history)
    corpus, other = history.corpus, history.folder / "corpus"
    shutil.rmtree(other, ignore_errors=True)
    shutil.copytree(corpus, other)
    manifest = other / "manifest.json"
    kept, text = manifest.read_text(), manifest.read_text()
    shard = json.loads(text)["splits"]["train"]["shards"][0]["tokens"]
    tokens = other / shard["name"]
    sound = tokens.read_bytes()
    tokens.write_bytes(sound.replace(b"q\0", b"Q\0"))
    history.corpus = other
    try:
        refused(history, "content changed")
        manifest.write_text(text.replace(shard["sha256"], sha256(tokens.read_bytes()).hexdigest()))
        refused(history, "a run on another corpus: content was")
        tokens.write_bytes(sound)
        manifest.write_text(kept)
        history.finish()
    finally:
        history.corpus = corpus


def damaged_json(history) -> None:
    """One field, or bytes, of a JSON file of the run: refused in one line with everything as it was, or harmless."""
    from tests.fuzz.mutations import mutated_bytes, mutated_json

    step = under_way(history)
    name = history.rng.choice([*DAMAGED, f"{names.CHECKPOINTS}/{step}/{names.MANIFEST}"])
    path = history.run / name
    sound = path.read_bytes()
    if history.rng.random() < 0.2:
        path.write_bytes(mutated_bytes(history.rng, sound))
    else:
        path.write_bytes(mutated_json(history.rng, json.loads(sound)).encode("utf-8", "surrogatepass"))
    changed, before = path.read_bytes(), everything(history.run)
    code, _ = history.command(history.argv(history.run))
    if code == 0:
        history.compare()
        return
    lines = [line for line in history.said.splitlines() if line.startswith("nagjax: error: ")]
    if code != faults.REFUSED or len(lines) != 1 or "Traceback" in history.said:
        history.lost(f"exit code {code} for {name} = {changed[:300]!r}:\n{history.said[-2000:]}")
    if everything(history.run) != before:
        history.lost(f"the refusal of {name} changed the folder")
    path.write_bytes(sound)
    history.finish()


def clock_backwards(history) -> None:
    """The clock goes back by up to a day in the middle of the run."""
    at, back, now = history.rng.randint(1, 60), history.rng.uniform(1, 86_400), time.time
    calls = itertools.count()

    def prepare() -> None:
        time.time = lambda: now() - (back if next(calls) > at else 0.0)

    under_way(history)
    code, _ = history.command(history.argv(history.run), prepare)
    if code:
        history.lost(f"the run ended with {code}:\n{history.said[-2000:]}")
    history.compare()


def slow_disk(history) -> None:
    """Every file that is opened, renamed or removed takes up to 30 ms."""
    rng = random.Random(history.rng.random())

    def audit(event: str, args: tuple) -> None:
        if event in ("open", "os.rename", "os.mkdir", "os.remove") and str(args[0]).startswith(str(history.folder)):
            time.sleep(rng.uniform(0, 0.03))

    under_way(history)
    code, _ = history.command(history.argv(history.run), lambda: sys.addaudithook(audit))
    if code:
        history.lost(f"the run ended with {code}:\n{history.said[-2000:]}")
    history.compare()


def another_mesh(history) -> None:
    """The run goes on over two devices that hold half of the parameters each, is killed there, and finishes on one."""
    under_way(history)
    rng = random.Random(history.rng.random())

    def prepare() -> None:
        two_devices()
        faults.arm("kill in a step", rng, history.run)

    code, _ = history.command(history.argv(history.run, "--mesh.fsdp", "2"), prepare)
    if code not in (0, faults.EXIT[signal.SIGKILL]):
        history.lost(f"two devices ended with {code}:\n{history.said[-2000:]}")
    code, _ = history.command(history.argv(history.run))
    if code:
        history.lost(f"one device ended with {code} after two:\n{history.said[-2000:]}")
    if apart := other_losses(history, history.records(), history.metrics):
        history.lost(apart)
    history.tally.finished += 1
    shutil.rmtree(history.run)


def killed_elsewhere(history) -> None:
    """SIGKILL before the n-th file operation of an export, import, pruning or preparation; the same command then makes
    the same."""
    under_way(history)
    out, bundle = history.folder / "made", history.folder / "bundle"
    export = ["export", str(history.run), "--format", "bundle", "--out"]
    text = str(history.corpus.with_name("text"))
    commands = [
        [*export, str(out)],
        ["import", str(bundle), "--out", str(out)],
        ["prune", str(history.run), "--out", str(out), "--rule", "late", "--count", "1", "--batches", "1"],
        ["data", "prepare", text, "--out", str(out), "--validation", "0.3"],
    ]
    shutil.rmtree(bundle, ignore_errors=True)
    history.command([*export, str(bundle)])
    for argv in history.rng.sample(commands, len(commands)):
        if history.command(argv)[0] == 0:
            break
    else:
        history.lost(f"none of these commands worked:\n{history.said[-2000:]}")
    whole, code = content(out), 0
    for _ in range(20):
        shutil.rmtree(out, ignore_errors=True)
        rng = random.Random(history.rng.random())
        code, _ = history.command(argv, lambda rng=rng: faults.arm("kill at a file operation", rng, history.folder))
        if code:
            break
    if code not in (0, faults.EXIT[signal.SIGKILL]):
        history.lost(f"{argv[0]} ended with {code}:\n{history.said[-2000:]}")
    if out.exists() and argv[0] != "data":  # a preparation goes on from its parts
        if content(out) != whole:
            history.lost(f"a part of {argv[0]} stands in its place")
        shutil.rmtree(out)
    code, _ = history.command(argv)
    if code or content(out) != whole:
        history.lost(f"{argv[0]} ended with {code} when it was run again:\n{history.said[-2000:]}")
    shutil.rmtree(out)
    if left := [path.name for path in history.folder.glob(".made*")]:
        history.lost(f"{argv[0]} left {left}")
    history.finish()


def content(folder: Path) -> list[str]:
    """Names of what lies in a folder; not the lock, which comes and goes."""
    return sorted(path.name for path in folder.iterdir() if path.name != names.LOCK)


ATTACKS: dict[str, Callable] = {
    "second writer": second_writer,
    "link": link,
    "foreign checkpoint": foreign,
    "changed corpus": other_corpus,
    "damaged JSON": damaged_json,
    "clock going backwards": clock_backwards,
    "slow disk": slow_disk,
    "kill in another command": killed_elsewhere,
    "another mesh": another_mesh,
}
