"""Faults of the folder, not of the process: another writer, links, foreign checkpoints, another corpus. The command
must refuse each in one line, change nothing, and go on as before when the cause is gone."""

import json
import shutil
import time
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path

import torture_faults as faults

from nagjax.runs import names

LINKED = (names.METRICS, names.CONFIG, names.CORPUS, names.IDENTITY, names.INFO)


def under_way(history) -> int:
    """Brings the run to where it has a checkpoint, and is not finished; the step of the newest one."""
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
    """Content by name, links as such; not the lock, which comes and goes."""
    found = {}
    for path in sorted(run.rglob("*")):
        name = str(path.relative_to(run))
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
    """A file of the run, or its newest checkpoint, is a link out of the folder."""
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


ATTACKS: dict[str, Callable] = {
    "second writer": second_writer,
    "link": link,
    "foreign checkpoint": foreign,
    "changed corpus": other_corpus,
}
