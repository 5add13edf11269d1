"""A run's folder: which run is in it, and whether the one asked for is the same."""

import shutil
from pathlib import Path

import jax

from nagjax.data import Dataset
from nagjax.errors import UserError
from nagjax.files import read_json, write_json, write_text
from nagjax.runs.config import RunConfig, differences, from_dict, to_dict
from nagjax.runs.names import CHECKPOINTS, CONFIG, CORPUS, FILES, TOKENIZER
from nagjax.train.checkpoint.store import steps_saved
from nagjax.train.distributed.consensus import from_first, together

# May differ between a run and its continuation: they do not change what was computed.
FREE_TO_CHANGE = {
    f"train.{name}"
    for name in ("eval_every", "save_every", "save_minutes", "keep", "keep_best", "keep_every", "log")
    + ("on_bad_step", "spike", "max_bad_steps")
}


def prepare_folder(config: RunConfig, folder: Path, corpus: Dataset, fresh: bool) -> None:
    """Makes the run folder, or checks that the run in it is this one, on this corpus. The first host does; the others
    must see the same folder.

    A folder without a complete checkpoint holds no run yet. Raises UserError: the folder cannot be written, or holds a
    run of another config (naming what differs) or corpus.
    """
    from_first(lambda: _prepare(config, folder, corpus, fresh))
    together(lambda: _seen(folder))


def _seen(folder: Path) -> None:
    if not (folder / CONFIG).is_file():
        fix = f"host {jax.process_index()} does not see what host 0 wrote there; choose an --out that all hosts share"
        raise UserError("out", str(folder), fix)


def _prepare(config: RunConfig, folder: Path, corpus: Dataset, fresh: bool) -> None:
    asked, identity = (
        to_dict(config),
        {
            "path": config.data.path,
            "tokenizer": corpus.tokenizer.fingerprint,
            "documents": corpus.document_count,
            "tokens": corpus.token_count,
            "bytes": corpus.byte_count,
        },
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if fresh:
            clear(folder)
        if steps_saved(folder / CHECKPOINTS):
            _refuse_another(folder, _completed(_read(folder / CONFIG)), asked, "another run")
            _refuse_another(folder, _read(folder / CORPUS), identity, "a run on another corpus")
        write_json(folder / CONFIG, asked)
        write_json(folder / CORPUS, identity)
        if (tokenizer := corpus.tokenizer.to_json()) is not None:
            write_text(folder / TOKENIZER, tokenizer)
    except PermissionError:
        raise UserError("out", str(folder), "no permission to write there; choose another --out") from None
    except (FileExistsError, NotADirectoryError):
        raise UserError("out", str(folder), "is a file, or lies under one; choose another --out") from None


def _completed(values: dict) -> dict:
    """A config.json with the defaults of what was no option yet when it was written."""
    try:
        return to_dict(from_dict(RunConfig, values))
    except (UserError, ValueError, TypeError, KeyError, AttributeError):
        return values  # of a later version, or changed by hand: the fields that differ are named


def _refuse_another(folder: Path, old: dict, new: dict, what: str) -> None:
    changed = differences(old, new)
    changed = {k: v for k, v in changed.items() if k not in FREE_TO_CHANGE and not k.startswith("mesh.")}
    if changed:
        listed = ", ".join(f"{name} was {was!r} and is now {now!r}" for name, (was, now) in changed.items())
        raise UserError("out", str(folder), f"holds {what}: {listed}; choose another --out, or --fresh")


def read_config(folder: Path) -> RunConfig:
    """The config of the run in `folder`. Raises UserError where there is none or it cannot be read."""
    path = folder / CONFIG
    try:
        values = read_json(path)
        if not isinstance(values.get("scheme"), dict):
            raise TypeError("no scheme")
        return from_dict(RunConfig, values)
    except (FileNotFoundError, NotADirectoryError):
        fix = "there is no config.json in it: give a folder that nagjax train has written"
        raise UserError("run", str(folder), fix) from None
    except UserError:
        raise
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError("run", str(folder), f"its config.json cannot be read ({error!r})") from None


def _read(path: Path) -> dict:
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        fix = f"belongs to a run and cannot be read ({error}): bring it back, or start over with --fresh"
        raise UserError("out", str(path), fix) from None


def clear(folder: Path) -> None:
    """Removes a run's checkpoints and metrics, and nothing else that may lie in its folder."""
    if jax.process_index() == 0:
        shutil.rmtree(folder / CHECKPOINTS, ignore_errors=True)
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
