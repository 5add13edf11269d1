"""Models by name: those that come with a clone of nagjax, and those of the Hugging Face hub, cached or fetched."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from nagjax.errors import UserError
from nagjax.files import has_file
from nagjax.interop.safetensors import all_there, pickles_in
from nagjax.runs.names import CHECKPOINTS, CONFIG, TOKENIZER, TOKENIZER_FILES

NAME = re.compile(r"(?P<owner>[\w.-]+)/(?P<model>[\w.-]+)(@(?P<revision>[\w./-]+))?")
SHIPPED = Path(__file__).resolve().parents[2] / "models"  # in a clone; an installed package has none
FETCHED = ["*.json", "*.safetensors", *TOKENIZER_FILES]
TWICE = "consolidated*"  # the same weights in another library's form


def find_model(source: str | Path, fetch: bool = False, say: Callable[[str], None] = lambda text: None) -> Path:
    """The folder of a model: `source` itself, unless there is no such folder here and it is the name of a model that
    comes with a clone, or OWNER/NAME or OWNER/NAME@REVISION of the hub (and there is no OWNER here either).

    Of a name it is the hub's local cache that is asked, without a network; fetch: then the hub, by `huggingface_hub`,
    also for the tokenizer of a model that is there without one.
    Raises UserError with the command that fetches the model.
    """
    path, name = Path(source), NAME.fullmatch(str(source))
    if len(path.parts) == 1 and not path.exists() and has_file(SHIPPED / path / CONFIG):
        return SHIPPED / path
    if name is None or path.exists() or path.parent.exists():
        return path
    repository, revision = f"{name['owner']}/{name['model']}", name["revision"] or "main"
    cached = _cached(name["owner"], name["model"], revision, pickles=not fetch)
    if cached and (not fetch or has_file(cached / TOKENIZER)):  # the library that filled the cache may not have asked
        return cached
    why = "huggingface_hub is not installed here" if fetch else "nagjax import fetches it"
    if fetch:
        try:
            from huggingface_hub import snapshot_download
        except ImportError:
            pass
        else:
            say(f"fetching {repository} from the hub")
            try:
                patterns = {"allow_patterns": FETCHED, "ignore_patterns": [TWICE]}
                folder = snapshot_download(repository, revision=revision, **patterns)
            except Exception as error:  # its client raises many unrelated types: network, names, rights
                why = f"it could not be fetched ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
            else:
                return _with_weights(Path(folder), repository)
    if cached:
        return cached
    command = f"hf download {repository}" + (f" --revision {revision}" if name["revision"] else "")
    fix = (
        f"is no folder here, nor in the hub's cache {cache_folder()}, and {why}. Where there is a network: pip install"
    )
    raise UserError("source", str(source), f"{fix} huggingface_hub && {command}")


def _with_weights(folder: Path, repository: str) -> Path:
    if not any(folder.glob("*.safetensors")):
        fix = "has no safetensors, and a pickle can run code when it is read: save the model as safetensors"
        raise UserError("source", repository, f"{fix} (save_pretrained of transformers does), and import that folder")
    return folder


def shipped() -> list[str]:
    """The names of the models that come with a clone; none where nagjax is installed without one."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG}"))


def report_folder(source: str | Path, out: Path | None) -> Path:
    """Where a page about a model goes: `out`; else the run's folder; of a model that is no run, NAME-report here."""
    path = Path(source)
    return out or (path if (path / CHECKPOINTS).is_dir() else Path(f"{path.resolve().name}-report"))


def cache_folder() -> Path:
    """The hub's local cache, by the variables that its own client reads."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _cached(owner: str, model: str, revision: str, pickles: bool) -> Path | None:
    """The snapshot of a model in the cache, where it has a config.json and all of its weights; with `pickles` also one
    that has no others, of which whoever opens it says what to do."""
    folder = cache_folder() / f"models--{owner}--{model}"
    named = folder / "refs" / revision
    try:
        commit = named.read_text(encoding="utf-8").strip() if named.is_file() else revision
    except (OSError, UnicodeDecodeError):
        return None
    snapshot = folder / "snapshots" / commit
    if not re.fullmatch(r"[\w.-]+", commit) or not snapshot.is_dir() or not has_file(snapshot / CONFIG):
        return None
    if pickles and not any(snapshot.glob("*.safetensors")) and pickles_in(snapshot):
        return snapshot
    return snapshot if all_there(snapshot) else None
