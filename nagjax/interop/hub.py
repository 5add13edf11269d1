"""Finds models by name: those that come with a clone of nagjax, and those of the Hugging Face hub, cached or
fetched."""

import os
import re
from collections.abc import Callable
from pathlib import Path

from nagjax.errors import UserError
from nagjax.files import has_file
from nagjax.interop.safetensors import all_there, pickles_in
from nagjax.runs.names import CHECKPOINTS, CONFIG, TOKENIZER, TOKENIZER_FILES

NAME = re.compile(r"(?P<owner>[\w.-]+)/(?P<model>[\w.-]+)(@(?P<revision>[\w./-]+))?")
SHIPPED = Path(__file__).resolve().parents[2] / "models"  # in a clone; an installed package has no such folder
FETCHED = ["*.json", "*.safetensors", *TOKENIZER_FILES]
TWICE = "consolidated*"  # the same weights in another library's format


def find_model(source: str | Path, fetch: bool = False, say: Callable[[str], None] = lambda text: None) -> Path:
    """The folder of a model. It is `source` itself if there is such a folder. Otherwise `source` is the name of a model
    that comes with a clone, or OWNER/NAME or OWNER/NAME@REVISION on the hub (if there is no local folder OWNER).

    A hub name is looked up in the hub's local cache, without a network. With `fetch`, `huggingface_hub` downloads a
    model that is missing, and the tokenizer of a cached model that lacks one. Raises UserError with the command that
    fetches the model.
    """
    path, name = Path(source), NAME.fullmatch(str(source))
    if len(path.parts) == 1 and not path.exists() and has_file(SHIPPED / path / CONFIG):
        return SHIPPED / path
    if name is None or path.exists() or path.parent.exists():
        return path
    repository, revision = f"{name['owner']}/{name['model']}", name["revision"] or "main"
    cached = _cached(name["owner"], name["model"], revision, pickles=not fetch)
    if cached and (not fetch or has_file(cached / TOKENIZER)):  # whatever filled the cache may not have asked for it
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
            except Exception as error:  # the client raises many unrelated types
                why = f"it could not be fetched ({type(error).__name__}: {str(error).strip().partition(chr(10))[0]})"
            else:
                return _with_weights(Path(folder), repository)
    if cached:
        return cached
    command = f"hf download {repository}" + (f" --revision {revision}" if name["revision"] else "")
    fix = f"is not a folder here, nor in the hub's cache {cache_folder()}, and {why}. Where there is a network"
    raise UserError("source", str(source), f"{fix}: pip install huggingface_hub && {command}")


def _with_weights(folder: Path, repository: str) -> Path:
    if not any(folder.glob("*.safetensors")):
        fix = "has no safetensors, and a pickle can run code when it is read: save the model as safetensors"
        raise UserError("source", repository, f"{fix} (save_pretrained of transformers does), and import that folder")
    return folder


def shipped() -> list[str]:
    """The names of the models that come with a clone; empty if nagjax was installed without one."""
    return sorted(path.parent.name for path in SHIPPED.glob(f"*/{CONFIG}"))


def report_folder(source: str | Path, out: Path | None) -> Path:
    """The folder for a page about a model: `out` if given, else the run's folder; for a model that is not a run,
    NAME-report in the current folder."""
    path = Path(source)
    return out or (path if (path / CHECKPOINTS).is_dir() else Path(f"{path.resolve().name}-report"))


def cache_folder() -> Path:
    """The hub's local cache, located by the same environment variables as its client uses."""
    home = os.environ.get("HF_HOME") or Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub").expanduser()


def _cached(owner: str, model: str, revision: str, pickles: bool) -> Path | None:
    """The cached snapshot of a model, if it has a config.json and all weights. With `pickles`, a snapshot with pickled
    weights alone counts, too; whoever opens it reports what to do about them."""
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
