"""A run's folder: which run is in it, whether it is the one asked for, and deleting it to make room for another."""

import json
import os
import re
import shlex
import time
from pathlib import Path

import jax

from nagjax.console import note
from nagjax.data import Dataset
from nagjax.errors import UserError
from nagjax.files import (
    create,
    has_file,
    partial_name,
    read_bytes,
    read_json,
    remove,
    what_lacks,
    write_bytes,
    write_json,
    write_text,
)
from nagjax.json_reader import parse_json
from nagjax.runs.config import RunConfig, completed, from_dict, to_dict
from nagjax.runs.identity import (
    corpus_identity,
    found_run,
    owner,
    read_id,
    refuse_other_corpus,
    refuse_other_settings,
    settle_id,
)
from nagjax.runs.names import (
    CHAT_TEMPLATE,
    CHECKPOINTS,
    CONFIG,
    CORPUS,
    DAMAGED,
    DELETING,
    FILES,
    FOLDERS,
    IDENTITY,
    MANIFEST,
    OF_WEIGHTS,
    ORIGIN,
    SAVING,
    SEAL,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
    WANDB,
    WANDB_ID,
)
from nagjax.train.checkpoint.store import finished, steps_aside, steps_saved
from nagjax.train.distributed.consensus import from_first, together

SEEN = 10.0  # seconds until a new file must be visible on all hosts
STEP = re.compile(rf"\d+({re.escape(DAMAGED)})?(({re.escape(SAVING)}|{re.escape(DELETING)}).*)?")


def prepare_folder(config: RunConfig, folder: Path, corpus: Dataset, fresh: bool) -> dict:
    """Makes `folder` that of a new run, or checks that the run in it has this config and this corpus. To be called on
    all hosts, under the folder's lock; the first host does the work, and the others must see the same folder.

    A folder without a checkpoint holds no run yet: files about weights that a run without a checkpoint has left there
    are deleted. Returns the `owner` that the manifests of the checkpoints name. In the folder of a finished run nothing
    is written. Raises UserError if the folder cannot be written, if it contains files that no run wrote under names
    that a run uses, or if it holds a run with other settings (naming them) or another corpus.
    """
    if jax.process_count() > 1:
        _check_shared(folder)
    return from_first(lambda: _prepare(config, folder, corpus, fresh))


def _check_shared(folder: Path) -> None:
    """Raises UserError if a host sees a folder of its own there, even a copy. Each host looks for a new file, which no
    cache of a network file system can know."""
    probe = folder / from_first(lambda: _probe(folder))
    try:
        together(lambda: _see(probe))
    finally:
        from_first(lambda: probe.unlink(missing_ok=True))


def _probe(folder: Path) -> str:
    """Creates an empty file in the folder and returns its name."""
    name = partial_name("shared")
    os.close(create(folder / name))
    return name


def _see(probe: Path) -> None:
    until = time.monotonic() + SEEN
    while not probe.exists():
        if time.monotonic() > until:
            fix = f"host {jax.process_index()} does not see what host 0 writes there: choose an --out that all share"
            raise UserError("out", str(probe.parent), fix)
        time.sleep(0.2)


def _prepare(config: RunConfig, folder: Path, corpus: Dataset, fresh: bool) -> dict:
    identity, always, once = corpus_identity(corpus), _told_by(corpus), _brought(config, corpus)
    begun = _holds_run(folder)
    if not begun:
        _refuse_others(folder, once | always)
    if fresh:
        clear(folder)
    if steps_saved(folder / CHECKPOINTS) or steps_aside(folder / CHECKPOINTS):
        refuse_other_run(folder, config, identity)
        if finished(folder / CHECKPOINTS, config.train.steps):
            return owner(config, read_id(folder))
        write_json(folder / CONFIG, to_dict(config))
        named = owner(config, settle_id(folder))
    else:
        if begun:
            _remove_left(folder)
        named = found_run(folder, config)
    write_json(folder / CORPUS, identity)
    for name, content in always.items():
        write_text(folder / name, content.decode())
    for name, content in once.items():
        if not has_file(folder / name):
            write_bytes(folder / name, content)
    return named


def _told_by(corpus: Dataset) -> dict[str, bytes]:
    """The files of a run that its corpus decides: contents by name."""
    told = {TOKENIZER: corpus.tokenizer.to_json(), CHAT_TEMPLATE: corpus.chat_template}
    return {name: text.encode() for name, text in told.items() if text}


def _brought(config: RunConfig, corpus: Dataset) -> dict[str, bytes]:
    """The files about its tokenizer that a run keeps unless it has them already, contents by name: a model continues
    with the files it was imported with. They are read before anything is deleted, so that an unreadable one stops
    nothing halfway."""
    tokens = corpus.template_tokens
    found = {TOKENIZER_CONFIG: json.dumps(tokens, indent=2).encode()} if tokens else {}
    for name in (ORIGIN, *TOKENIZER_FILES) if config.start else ():
        if has_file(source := Path(config.start) / name):
            found[name] = read_bytes(source)
    return found


def _holds_run(folder: Path) -> bool:
    """Whether the folder holds a run, even a damaged one, or what an interrupted deletion has left of one: its id, a
    checkpoint with its manifest, or a config.json with a scheme. File names alone prove nothing, as other programs use
    them too."""
    if any(STEP.fullmatch(path.name) and _saved(path) for path in _entries(folder / CHECKPOINTS)):
        return True
    places = [(folder / f"{IDENTITY}{left}", folder / f"{CONFIG}{left}") for left in ("", DELETING)]
    return any(_has(known, "id", str) or _has(config, "scheme", dict) for known, config in places)


def _saved(path: Path) -> bool:
    return not path.name.isdigit() or any(os.path.lexists(path / name) for name in (MANIFEST, SEAL))


def _has(path: Path, field: str, kind: type) -> bool:
    """Whether a JSON file has a field of this name and type. Read leniently, because other libraries write such files
    too."""
    try:
        values = read_json(path, lenient=True)
    except (OSError, ValueError, UserError):
        return False
    return isinstance(values, dict) and isinstance(values.get(field), kind)


def _refuse_others(folder: Path, own: dict[str, bytes]) -> None:
    """Raises UserError if a folder without a run has a file under a name that a run uses, unless its content is what
    this run will write. The folder may belong to another library's model."""
    for name in FILES:
        if os.path.lexists(folder / name) and not (name in own and _says(folder / name, own[name])):
            fix = f"its {name} is not that of a run, and would be replaced: choose another --out"
            raise UserError("out", str(folder), fix)


def _says(path: Path, content: bytes) -> bool:
    """Whether the file has this content or the same JSON value; a tokenizer's file may be formatted differently."""
    try:
        found = read_bytes(path)
        return found == content or parse_json(found, lenient=True) == parse_json(content, lenient=True)
    except (OSError, ValueError, UserError):
        return False


def _remove_left(folder: Path) -> None:
    left = [name for name in OF_WEIGHTS if os.path.lexists(folder / name)]
    for name in left:
        (folder / name).unlink()
    if left:
        note(f"nagjax: of a run that saved nothing, deleted in {folder}: {', '.join(left)}")


def refuse_other_run(folder: Path, config: RunConfig, corpus: dict) -> None:
    """Raises UserError if the run in `folder` has another config or another corpus (compared by `corpus_identity`)."""
    refuse_other_settings(folder, completed(RunConfig, _read(folder / CONFIG)), to_dict(config))
    refuse_other_corpus(folder, _read(folder / CORPUS), corpus)


def read_config(folder: Path) -> RunConfig:
    """The config of the run in `folder`. Raises UserError if there is none or it cannot be read."""
    try:
        values = _read_object(folder / CONFIG)
    except (FileNotFoundError, NotADirectoryError):
        what = what_lacks(folder, CONFIG)
        fix = f"{what}: give a folder that nagjax train has written; nagjax import MODEL --out RUN makes one of a model"
        raise UserError("run", str(folder), fix) from None
    except (OSError, ValueError) as error:
        raise UserError("run", str(folder), f"its {CONFIG} cannot be read ({error})") from None
    if "model_type" in values:
        fix = f"is a model's folder, not a run's: nagjax import {shlex.quote(str(folder))} --out RUN makes a run of it"
        raise UserError("run", str(folder), fix)
    try:
        return from_dict(RunConfig, values)
    except UserError as error:
        raise UserError(error.field, error.value, f"{error.fix} (in {folder / CONFIG})") from None


def _read(path: Path) -> dict:
    try:
        return _read_object(path)
    except (OSError, ValueError) as error:
        fix = f"belongs to a run and cannot be read ({error}): bring it back, or choose another --out"
        raise UserError("out", str(path), fix) from None


def _read_object(path: Path) -> dict:
    values = read_json(path)
    if not isinstance(values, dict):
        raise ValueError("it is not a JSON object")
    return values


def clear(folder: Path) -> None:
    """Deletes what a run has written in `folder`, its checkpoints and files by name, and lists it on stderr first.
    Deletes nothing else, and nothing at all if there is no run. `checkpoints` may be a link: the checkpoints are then
    deleted in the folder that it leads to, and the link stays.

    Raises UserError, with everything as it was, if a part of it cannot be deleted.
    """
    folder = folder.resolve()
    if not _holds_run(folder):
        return
    checkpoints = (folder / CHECKPOINTS).resolve()
    steps = [path for path in _entries(checkpoints) if STEP.fullmatch(path.name)]
    written = [name for name in FOLDERS if name != WANDB or has_file(folder / WANDB_ID)]  # else another program's
    known = {f"{name}{left}" for name in (*FILES, *written) for left in ("", DELETING)}
    files = [path for path in _entries(folder) if path.name in known]
    gone = steps + sorted(files, key=lambda path: path.name.startswith((CONFIG, IDENTITY)))  # last: they identify a run
    if not gone:
        return
    names = ", ".join(str(p.relative_to(folder) if p.is_relative_to(folder) else p) for p in gone)
    note(f"nagjax: --fresh deletes in {folder}: {names}")
    for parent in {path.parent for path in gone}.union(*(_folders(path) for path in gone)):
        if not os.access(parent, os.W_OK | os.X_OK):
            fix = "no permission to delete what is in it: nothing was deleted; choose another --out"
            raise UserError("out", str(parent), fix)
    for path in _set_aside(gone):
        remove(path)
    if checkpoints.parent == folder and checkpoints.is_dir() and not any(checkpoints.iterdir()):
        checkpoints.rmdir()


def _set_aside(paths: list[Path]) -> list[Path]:
    """Renames all of the paths or none; checkpoints first, because without them there is no run."""
    moved: list[tuple[Path, Path]] = []
    for path in paths:
        aside = path if path.name.endswith(DELETING) else path.with_name(f"{path.name}{DELETING}")
        try:
            if aside != path and os.path.lexists(aside):
                remove(aside)
            path.rename(aside)
        except OSError as error:
            for before, after in reversed(moved):
                after.rename(before)
            fix = f"cannot be deleted ({error.strerror}): nothing was deleted; choose another --out"
            raise UserError("out", str(path), fix) from None
        moved.append((path, aside))
    return list(dict.fromkeys(aside for _, aside in moved))


def _entries(folder: Path) -> list[Path]:
    return sorted(folder.iterdir()) if folder.is_dir() else []


def _folders(path: Path) -> set[Path]:
    """The folders in and under the path, with itself; links are not entered."""
    return {Path(parent) for parent, _, _ in os.walk(path)} if path.is_dir() and not path.is_symlink() else set()
