"""A run's folder: which run is in it, whether the one asked for is the same, and making room for another."""

import os
import re
import shutil
import sys
from pathlib import Path

import jax

from nagjax.data import Dataset
from nagjax.errors import UserError
from nagjax.files import copy, has_file, read_json, write_json, write_text
from nagjax.runs.config import RunConfig, from_dict, to_dict
from nagjax.runs.identity import (
    corpus_identity,
    found_run,
    owner,
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
    ORIGIN,
    SAVING,
    TOKENIZER,
    TOKENIZER_CONFIG,
    TOKENIZER_FILES,
)
from nagjax.train.checkpoint.store import steps_aside, steps_saved
from nagjax.train.distributed.consensus import from_first, together

STEP = re.compile(rf"\d+(({re.escape(SAVING)}|{re.escape(DELETING)}).*|{re.escape(DAMAGED)})?")


def prepare_folder(config: RunConfig, folder: Path, corpus: Dataset, fresh: bool) -> dict:
    """Makes the folder that of a run, or checks that the run in it is this one, on this corpus. The first host does;
    the others must see the same folder. To be called under the folder's lock.

    A folder without a checkpoint holds no run yet. Returns what the manifests of its checkpoints name.
    Raises UserError: the folder cannot be written, is that of something else than a run, or holds a run of other
    settings (naming them) or corpus.
    """
    named = from_first(lambda: _prepare(config, folder, corpus, fresh))
    together(lambda: _seen(folder))
    return named


def _seen(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        fix = f"host {jax.process_index()} does not see what host 0 wrote there; choose an --out that all hosts share"
        raise UserError("out", str(folder), fix)


def _prepare(config: RunConfig, folder: Path, corpus: Dataset, fresh: bool) -> dict:
    identity = corpus_identity(corpus)
    _refuse_no_run(folder)
    if fresh:
        clear(folder)
    if steps_saved(folder / CHECKPOINTS) or steps_aside(folder / CHECKPOINTS):
        refuse_other_run(folder, config, identity)
        write_json(folder / CONFIG, to_dict(config))
        named = owner(config, settle_id(folder))
    else:
        for left in (ORIGIN, *TOKENIZER_FILES) if has_file(folder / CONFIG) else ():  # by a run that saved nothing
            (folder / left).unlink(missing_ok=True)
        named = found_run(folder, config)
    write_json(folder / CORPUS, identity)
    if (tokenizer := corpus.tokenizer.to_json()) is not None:
        write_text(folder / TOKENIZER, tokenizer)
    if corpus.chat_template:
        write_text(folder / CHAT_TEMPLATE, corpus.chat_template)
    for name in (ORIGIN, *TOKENIZER_FILES) if config.start else ():
        source = Path(config.start) / name
        if has_file(source) and not has_file(folder / name):  # a model goes on with what it was imported with
            copy(source, folder / name)
    if corpus.template_tokens and not has_file(folder / TOKENIZER_CONFIG):
        write_json(folder / TOKENIZER_CONFIG, corpus.template_tokens)
    return named


def _refuse_no_run(folder: Path) -> None:
    """Raises UserError for the folder of a model of another library, say, whose files a run's would replace."""
    try:
        values = read_json(folder / CONFIG)
    except (OSError, ValueError, UserError):
        return
    known = isinstance(values, dict) and "scheme" in values
    if not (known or (folder / IDENTITY).exists() or (folder / CHECKPOINTS).exists()):
        fix = f"its {CONFIG} is no run's, and would be replaced by this one's: choose another --out"
        raise UserError("out", str(folder), fix)


def refuse_other_run(folder: Path, config: RunConfig, corpus: dict) -> None:
    """Raises UserError where the run in `folder` is not of this config and this corpus (its `corpus_identity`)."""
    refuse_other_settings(folder, _completed(_read(folder / CONFIG)), to_dict(config))
    refuse_other_corpus(folder, _read(folder / CORPUS), corpus)


def _completed(values: dict) -> dict:
    """A config.json with the defaults of what was no option yet when it was written."""
    try:
        return to_dict(from_dict(RunConfig, values))
    except UserError:
        return values  # of a later version, or changed by hand: the fields that differ are named


def read_config(folder: Path) -> RunConfig:
    """The config of the run in `folder`. Raises UserError where there is none or it cannot be read."""
    try:
        values = _read_object(folder / CONFIG)
    except (FileNotFoundError, NotADirectoryError):
        fix = f"there is no {CONFIG} in it: give a folder that nagjax train has written"
        raise UserError("run", str(folder), fix) from None
    except (OSError, ValueError) as error:
        raise UserError("run", str(folder), f"its {CONFIG} cannot be read ({error})") from None
    if "model_type" in values:
        fix = f"is a model's folder, not a run's: nagjax import {folder} --out RUN makes a run of it"
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
        raise ValueError("it is no JSON object")
    return values


def clear(folder: Path) -> None:
    """Says on stderr what a run has written in `folder`, and deletes it: its checkpoints and files by name, nothing
    else. `checkpoints` may be a link; what it leads to is emptied of checkpoints, and the link stays.

    Raises UserError, with everything as it was, where something of it cannot be deleted.
    """
    folder = folder.resolve()
    checkpoints = (folder / CHECKPOINTS).resolve()
    steps = [path for path in _entries(checkpoints) if STEP.fullmatch(path.name)]
    known = {f"{name}{left}" for name in (*FILES, *FOLDERS) for left in ("", DELETING)}
    gone = steps + [path for path in _entries(folder) if path.name in known]
    if not gone:
        return
    names = ", ".join(str(p.relative_to(folder) if p.is_relative_to(folder) else p) for p in gone)
    print(f"nagjax: --fresh deletes in {folder}: {names}", file=sys.stderr)
    for parent in {path.parent for path in gone}.union(*(_folders(path) for path in gone)):
        if not os.access(parent, os.W_OK | os.X_OK):
            fix = "no permission to delete what is in it: nothing was deleted; choose another --out"
            raise UserError("out", str(parent), fix)
    for path in _set_aside(gone):
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if checkpoints.parent == folder and checkpoints.is_dir() and not any(checkpoints.iterdir()):
        checkpoints.rmdir()


def _set_aside(paths: list[Path]) -> list[Path]:
    """Renames all, checkpoints first (without them there is no run), or none."""
    moved: list[tuple[Path, Path]] = []
    for path in paths:
        aside = path if path.name.endswith(DELETING) else path.with_name(f"{path.name}{DELETING}")
        try:
            if aside != path and os.path.lexists(aside):
                shutil.rmtree(aside) if aside.is_dir() and not aside.is_symlink() else aside.unlink()
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
    """The folders in and under it; links are not entered."""
    return {Path(parent) for parent, _, _ in os.walk(path)} if path.is_dir() and not path.is_symlink() else set()
