"""What makes a run this run: its id, the settings that decide what is computed, and its corpus."""

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

# Of the training: which steps are bad, what becomes of them, and when it gives up. They decide which updates are made
# and may differ all the same between a run and its continuation, whose log tells: one changes them where a run breaks
# down.
JUDGEMENT = ("on_bad_step", "spike", "max_bad_steps")
# May differ, too: the rest does not change what is computed, but for the order of sums, as the mesh does not. The text
# and the tokenizer are known by their content (`corpus_identity`), not by where they lie.
FREE_TO_CHANGE = {
    f"train.{name}"
    for name in ("eval_every", "save_every", "save_minutes", "keep", "keep_best", "keep_every", "log")
    + ("tasks", "tasks_every", "tasks_limit", "loss_chunk", *JUDGEMENT)
} | {"data.path", "data.mix", "data.tokenizer", "data.workers", "model.remat", "model.attention", "model.kernels"}
WHERE_FROM = "path"  # of a corpus
START = "start"  # known by the id of the run that lies there (`_starts`)


@dataclass(frozen=True)
class _Identity:
    id: str
    start: str | None = None  # the id of the run that it started from


@dataclass(frozen=True)
class _Corpus:
    content: str | None = None  # older versions noted counts only


def settled(config: RunConfig | dict) -> dict:
    """By dotted name, the settings that a run keeps for life."""
    values = flatten(to_dict(config) if isinstance(config, RunConfig) else config)
    return {k: v for k, v in values.items() if k not in {*FREE_TO_CHANGE, START} and not k.startswith("mesh.")}


def corpus_identity(corpus: Dataset) -> dict:
    """The content of a run's corpus.json; a mixture's has the content and the weights of every corpus in it."""
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
    """What a run has noted of the text it reads, but not where it lies: equal for two runs on one text by one
    tokenizer. None where nothing or, by an older version, no content is noted."""
    try:
        found = read_json(folder / CORPUS)
    except (OSError, ValueError, UserError):
        return None
    if not isinstance(found, dict) or not found.get("content"):
        return None
    return {name: value for name, value in found.items() if name != WHERE_FROM}


def owner(config: RunConfig, run: str | None) -> dict:
    """What the manifests of a run's checkpoints name: its id and its settings."""
    return {"run": run, "config": settled(config)}


def found_run(folder: Path, config: RunConfig) -> dict:
    """Makes the folder that of a new run: writes its config and a new id. Returns its `owner`."""
    run, start = uuid.uuid4().hex, read_id(Path(config.start)) if config.start else None
    write_json(folder / CONFIG, to_dict(config))
    write_json(folder / IDENTITY, {"id": run} | ({"start": start} if start else {}))
    return owner(config, run)


def read_id(folder: Path) -> str | None:
    """None where an older version made the run."""
    found = _read_identity(folder)
    return found.id if found else None


def start_of(folder: Path) -> str | None:
    """The id of the run that the one in `folder` started from; None where it did not, or an older version made it."""
    found = _read_identity(folder)
    return found.start if found else None


def _read_identity(folder: Path) -> _Identity | None:
    return read_record(_Identity, folder / IDENTITY, "run", "bring it back", others=(_Identity,))


def settle_id(folder: Path) -> str:
    """The run's id; one of an older version gets one now."""
    run = read_id(folder)
    if run is None:
        run = uuid.uuid4().hex
        write_json(folder / IDENTITY, {"id": run})
    return run


def refuse_other_settings(folder: Path, old: dict, new: dict) -> None:
    """Raises UserError naming the settings in which a run and its continuation differ."""
    was, now = settled(old), settled(new)
    was[START], now[START] = _starts(folder, old.get(START) or "", new.get(START) or "")
    if changed := _changed(was, now):
        fix = f"holds another run: {changed}; give these as they were, or choose another --out (--fresh deletes it)"
        raise UserError("out", str(folder), fix)


def refuse_other_corpus(folder: Path, old: dict, new: dict) -> None:
    """Raises UserError where a run is to go on with another text. It may lie elsewhere, and older records have counts
    without the content."""
    known = old.keys() & new.keys() - {WHERE_FROM}
    if changed := _changed({name: old[name] for name in known}, {name: new[name] for name in known}):
        fix = f"holds a run on another corpus: {changed}; give the one it was begun with, or choose another --out"
        raise UserError("out", str(folder), fix)


def _starts(folder: Path, old: str, new: str) -> tuple[Any, Any]:
    """What a run and its continuation name as the run to start from; equal if that is the same one: by its id where
    both are known, as it may lie elsewhere by now, else by where it lies."""
    if not (old and new):
        return old, new
    known, there = start_of(folder), read_id(Path(new))
    same = known == there if known and there else Path(old).resolve() == Path(new).resolve()
    if same:
        return new, new
    return ((old, known), (new, there)) if old == new else (old, new)  # at one place another run lies by now


def check_corpus(folder: Path, corpus: Dataset) -> None:
    """Raises UserError where the corpus is not the one that the run in `folder` was trained on, as far as recorded."""
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
