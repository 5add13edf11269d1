"""What identifies a run: its id, the settings that determine what is computed, and its corpus."""

import dataclasses
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nagjax.data import Dataset, Mixture
from nagjax.data.shares import parse_mix
from nagjax.errors import UserError
from nagjax.files import read_json, read_record, write_json
from nagjax.runs.config import RunConfig, differences, flatten, to_dict
from nagjax.runs.names import CONFIG, CORPUS, IDENTITY

# Settings that say which steps are bad, what follows from one, and when the run gives up. They affect which updates are
# made. A continuation may still change them, as one does when training breaks down; the log tells.
JUDGEMENT = ("on_bad_step", "spike", "max_bad_steps")
# A continuation may change these, too: they do not change what is computed, except for the order of sums, as with the
# mesh. The text and the tokenizer are compared by content (`corpus_identity`), not by path.
FREE_TO_CHANGE = {
    f"train.{name}"
    for name in ("eval_every", "save_every", "save_minutes", "keep", "keep_best", "keep_every", "log")
    + ("tasks", "tasks_every", "tasks_limit", "loss_chunk", *JUDGEMENT)
} | {"data.path", "data.mix", "data.tokenizer", "data.workers", "model.remat", "model.attention", "model.kernels"}
WHERE_FROM = "path"  # the entry of a corpus's identity that says where it lies
START = "start"  # compared by the id of the run that lies there (`_starts`)


@dataclass(frozen=True)
class _Identity:
    id: str
    start: str | None = None  # the id of the run that it started from
    start_step: int | None = None  # the step of that run whose weights it began with; None: not read yet, or not stored


@dataclass(frozen=True)
class _Corpus:
    content: str | None = None  # None: an older version stored only counts


def settled(config: RunConfig | dict) -> dict:
    """The settings that a run must keep, by dotted name."""
    values = flatten(to_dict(config) if isinstance(config, RunConfig) else config)
    return {k: v for k, v in values.items() if k not in {*FREE_TO_CHANGE, START} and not k.startswith("mesh.")}


def corpus_identity(corpus: Dataset) -> dict:
    """The content of a run's corpus.json; of a mixture, with the content and the weights of every corpus in it."""
    mixed = {}
    if isinstance(corpus, Mixture):
        for i, (part, one) in enumerate(zip(parse_mix(corpus.config.mix), corpus.corpora, strict=True)):
            mixed |= {f"data.mix[{i}].content": one.content, f"data.mix[{i}].weights": part.schedule}
    return mixed | {
        WHERE_FROM: list(corpus.config.mix) or str(corpus.config.path),
        "tokenizer": corpus.tokenizer.fingerprint,
        "documents": corpus.document_count,
        "tokens": corpus.token_count,
        "bytes": corpus.byte_count,
        "content": corpus.content,
    }


def known_text(folder: Path) -> dict[str, Any] | None:
    """What a run has stored about the text that it reads, without the path: equal for two runs on the same text with
    the same tokenizer. None if nothing is stored, or, by an older version, no hash of the content."""
    try:
        found = read_json(folder / CORPUS)
    except (OSError, ValueError, UserError):
        return None
    if not isinstance(found, dict) or not found.get("content"):
        return None
    return {name: value for name, value in found.items() if name != WHERE_FROM}


def owner(config: RunConfig, run: str | None) -> dict:
    """What the manifests of a run's checkpoints name as their owner: the run's id and its settings."""
    return {"run": run, "config": settled(config)}


def found_run(folder: Path, config: RunConfig) -> dict:
    """Makes the folder that of a new run: writes its config and a new id. Returns its `owner`."""
    run, start = uuid.uuid4().hex, read_id(Path(config.start)) if config.start else None
    step = start_step_of(folder, Path(config.start)) if config.start else None  # of a run that has saved nothing here
    write_json(folder / CONFIG, to_dict(config))
    _write_identity(folder, _Identity(run, start, step))
    return owner(config, run)


def read_id(folder: Path) -> str | None:
    """The id of the run in `folder`; None if an older version made the run. Raises UserError if the file cannot be
    read."""
    found = _read_identity(folder)
    return found.id if found else None


def start_of(folder: Path) -> str | None:
    """The id of the run from which the run in `folder` started; None if it started from none, or an older version made
    it."""
    found = _read_identity(folder)
    return found.start if found else None


def start_step_of(folder: Path, start: Path) -> int | None:
    """The step of the run in `start` whose weights the run in `folder` began with; None if it has not begun with it, or
    an older version made one of the two."""
    found, there = _read_identity(folder), read_id(start)
    return found.start_step if found is not None and there is not None and found.start == there else None


def settle_start_step(folder: Path, step: int) -> None:
    """Stores the step whose weights the run in `folder` begins with."""
    found = _read_identity(folder)
    if found is not None and found.start_step != step:
        _write_identity(folder, dataclasses.replace(found, start_step=step))


def _write_identity(folder: Path, known: _Identity) -> None:
    write_json(folder / IDENTITY, {name: value for name, value in vars(known).items() if value is not None})


def _read_identity(folder: Path) -> _Identity | None:
    return read_record(_Identity, folder / IDENTITY, "run", "bring it back", others=(_Identity,))


def settle_id(folder: Path) -> str:
    """The run's id; a run of an older version is given one."""
    run = read_id(folder)
    if run is None:
        run = uuid.uuid4().hex
        _write_identity(folder, _Identity(run))
    return run


def refuse_other_settings(folder: Path, old: dict, new: dict) -> None:
    """Raises UserError naming the settings in which a run and its continuation differ."""
    was, now = settled(old), settled(new)
    was[START], now[START] = _starts(folder, old.get(START) or "", new.get(START) or "")
    if changed := _changed(was, now):
        fix = f"holds another run: {changed}; give these as they were, or choose another --out (--fresh deletes it)"
        raise UserError("out", str(folder), fix)


def refuse_other_corpus(folder: Path, old: dict, new: dict) -> None:
    """Raises UserError if a run would continue with another text. The path may differ, and older records have counts
    but no hash of the content."""
    known = old.keys() & new.keys() - {WHERE_FROM}
    if changed := _changed({name: old[name] for name in known}, {name: new[name] for name in known}):
        fix = f"holds a run on another corpus: {changed}; give the one it was begun with, or choose another --out"
        raise UserError("out", str(folder), fix)


def _starts(folder: Path, old: str, new: str) -> tuple[Any, Any]:
    """The runs to start from that a run and its continuation name; equal if they are the same run. They are compared by
    id if both ids are known, because a run may have been moved, and else by path."""
    if not (old and new):
        return old, new
    known, there = start_of(folder), read_id(Path(new))
    same = known == there if known and there else Path(old).resolve() == Path(new).resolve()
    if same:
        return new, new
    return ((old, known), (new, there)) if old == new else (old, new)  # another run now lies at this path


def check_corpus(folder: Path, corpus: Dataset) -> None:
    """Raises UserError if the corpus is not the one that the run in `folder` was trained on, as far as that is
    recorded."""
    known = read_record(_Corpus, folder / CORPUS, "run", "bring it back", others=(_Corpus,)) or _Corpus()
    if known.content is not None and known.content != corpus.content:
        field, value = ("data.mix", corpus.config.mix) if corpus.config.mix else ("data.path", corpus.config.path)
        one = corpus.config.mix[0].rpartition("=")[0] if corpus.config.mix else corpus.config.path
        fix = f"is not the text that the run was trained on; to read it all the same give --data {one}"
        raise UserError(field, value, fix)


def _changed(old: dict, new: dict) -> str:
    told = lambda value: "not given" if value is None else repr(value)  # noqa: E731
    found = differences(old, new).items()
    return ", ".join(f"{name} was {told(was)} and is now {told(now)}" for name, (was, now) in found)
