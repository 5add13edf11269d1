"""Checkpoints of the whole training state. They are written in the background, and appear only once they are
complete."""

import concurrent.futures
import contextlib
import os
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax
from orbax.checkpoint import v1 as ocp

from nagjax.console import note
from nagjax.errors import UserError
from nagjax.files import sync_folder
from nagjax.runs.names import DAMAGED, DELETING, SAVING
from nagjax.train.checkpoint.manifest import Damaged, read_manifest, verify, write_facts, write_manifest
from nagjax.train.checkpoint.retention import Saved, kept
from nagjax.train.distributed.consensus import from_first, together

SPARE = 1 << 20  # bytes that a checkpoint may need besides its arrays
# The least bytes of a part, where the devices that hold copies of an array each write a part of it. Smaller parts cost
# more than they save: each distinct part shape is a program to compile before the first checkpoint is written.
PART = 1 << 20


@runtime_checkable
class Named(Protocol):
    """The type of any named tuple; `typing.NamedTuple` itself is not a type."""

    def _asdict(self) -> dict[str, Any]: ...


class Checkpoints:
    """A folder of checkpoints, each of which is a folder named by its number of steps done.

    A save is written under a temporary name, given its manifest (sizes and SHA-256 of all files), and renamed: a folder
    whose name is a number is a complete checkpoint. Only then are the checkpoints removed that the policy does not
    keep; it keeps the `latest` newest, the `best` with the lowest scores, and every multiple of `every`.

    `check` is called before a checkpoint gets its name and before one is removed, and raises if another process has
    taken the folder. While one is written, its folder has a name of its own in every process.

    Manifests name the step and the `owner`, `{"run": id, "config": settings by dotted name}`; a checkpoint of another
    owner or step is refused. The folder itself may be a link.

    In a run of several processes all of them call the same methods in the same order, and share the folder. The first
    process writes and reads the manifests and removes checkpoints; an error on one process raises on all.
    """

    def __init__(
        self,
        folder: Path,
        owner: dict | None = None,
        latest: int = 2,
        best: int = 0,
        every: int = 0,
        check: Callable[[], None] = lambda: None,
    ):
        self.folder, self.owner, self._check = Path(folder).resolve(), owner or {}, check
        self._ending = from_first(lambda: f"{SAVING}.{uuid.uuid4().hex[:12]}")
        self._policy = {"latest": latest, "best": best, "every": every}
        self._first = jax.process_index() == 0
        self._worker = concurrent.futures.ThreadPoolExecutor(1, "checkpoint")
        self._pending: tuple[Saved, concurrent.futures.Future] | None = None
        self._done = [Saved(*found) for found in from_first(self._open)]

    def _open(self) -> list[tuple[int, float | None]]:
        for left in self.folder.glob("*.*"):  # of a process that was killed while it wrote or removed
            step, _, state = left.name.partition(".")
            if step.isdigit() and (f".{state}".startswith((SAVING, DELETING)) or left.name.endswith(DELETING)):
                shutil.rmtree(left, ignore_errors=True)
        found = []
        for step in steps_saved(self.folder):
            path = self.folder / str(step)
            refuse_foreign(path, self.owner)  # refused at once: later the policy might remove it as one of this run's
            found.append((step, saved_facts(path).get("score")))
        return found

    @property
    def latest(self) -> int | None:
        """The number of steps done at the newest complete checkpoint, or None."""
        return max((s.step for s in self._done), default=None)

    @property
    def saved(self) -> list[Saved]:
        """The complete checkpoints, and the one being written if there is one."""
        done, pending = self._done, self._pending
        return done if pending is None or pending[0] in done else [*done, pending[0]]

    def save(self, step: int, state: Named, facts: dict | None = None) -> None:
        """Waits for the previous save, then starts this one; the caller may donate the arrays as soon as this returns.

        `facts` are JSON values kept with the checkpoint; `facts["score"]` ranks the best checkpoints. If this step is
        saved already, only the facts are rewritten, and only if they report an evaluation that the saved ones lack.
        Raises UserError if the disk has too little free space, and if the previous save failed.
        """
        self.wait()
        saved, facts = Saved(step, (facts or {}).get("score")), facts or {}
        if step in {s.step for s in self._done}:
            self._note(saved, facts)
            return
        with self._saving():
            together(lambda: self._check_room(state))
            context = ocp.Context()
            context.array.saving.min_slice_bytes_for_replica_parallel = PART
            with context:
                writing = ocp.save_async(str(self._scratch(step)), _parts(state), overwrite=True)
        self._pending = saved, self._worker.submit(self._finish, writing, saved, facts)

    def _scratch(self, step: int) -> Path:
        return self.folder / f"{step}{self._ending}"

    def _note(self, saved: Saved, facts: dict) -> None:
        """Records an evaluation that was interrupted before the save and has been completed after it."""
        path = self.folder / str(saved.step)
        known = self.facts(saved.step)
        if known.get("evaluated") is False and facts.get("evaluated"):
            self._done = [saved if s.step == saved.step else s for s in self._done]
            from_first(lambda: _rewrite_facts(path, facts))

    def _finish(self, writing, saved: Saved, facts: dict) -> None:
        writing.result()
        stays = kept([*self._done, saved], **self._policy)
        if self._first:
            place, scratch = self.folder / str(saved.step), self._scratch(saved.step)
            write_manifest(scratch, facts, self.owner | {"step": saved.step})
            self._check()
            scratch.rename(place)
            sync_folder(self.folder)
            for old in {s.step for s in self._done} - stays:
                self._check()
                self._remove(old)
        self._done = [s for s in [*self._done, saved] if s.step in stays]

    def _remove(self, step: int) -> None:
        gone = self.folder / f"{step}{DELETING}"  # a half-removed checkpoint never has a checkpoint's name
        try:
            (self.folder / str(step)).rename(gone)
        except FileNotFoundError:  # removed by hand
            return
        except OSError as error:
            note(f"nagjax: checkpoint {self.folder / str(step)} could not be removed ({error.strerror}) and stays")
        shutil.rmtree(gone, ignore_errors=True)  # what this leaves is removed when the run is next opened

    def _check_room(self, state: Named) -> None:
        needed = sum(leaf.nbytes for leaf in jax.tree.leaves(state)) + SPARE
        self.folder.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(self.folder).free
        if self._first and free < needed:
            raise OSError(f"it takes up to {needed:,} bytes and {free:,} are free")

    @property
    def failed(self) -> bool:
        """Whether this process's part of the background save has failed, in which case `wait` will raise. Does not
        wait."""
        return self._pending is not None and self._pending[1].done() and self._pending[1].exception() is not None

    def wait(self) -> None:
        """Waits until everything is on disk. Raises UserError if the save failed; it then does not count as done."""
        pending, self._pending = self._pending, None
        if pending is not None:
            with self._saving():
                try:
                    together(pending[1].result)
                except Exception:
                    self._done = [saved for saved in self._done if saved != pending[0]]
                    raise

    def newest(self, skip_damaged: bool = False) -> int | None:
        """The step of the newest checkpoint, after verifying it; None if there are no checkpoints.

        Raises UserError naming the damaged file if a file differs from what was saved. With `skip_damaged` damaged
        checkpoints are named on stderr and renamed to N.damaged, and the newest intact one is taken; raises UserError
        if none is.
        """
        found = from_first(lambda: self._newest(skip_damaged))
        self._done = [s for s in self._done if found is not None and s.step <= found]
        return found

    def _newest(self, skip_damaged: bool) -> int | None:
        for step in sorted((s.step for s in self._done), reverse=True):
            if not (self.folder / str(step)).exists():
                continue  # removed by hand in the meantime
            try:
                verify(self.folder / str(step))
                return step
            except Damaged as damage:
                if not skip_damaged:
                    raise _damaged(self.folder / str(step), damage) from damage
                note(f"nagjax: checkpoint {self.folder / str(step)} is damaged and skipped: {damage}")
                self._put_aside(step)
        if steps_aside(self.folder):
            fix = "no intact checkpoint is left in it: bring one back, or choose another --out (--fresh deletes it)"
            raise UserError("checkpoint", str(self.folder), fix)
        return None

    def _put_aside(self, step: int) -> None:
        aside = self.folder / f"{step}{DAMAGED}"
        shutil.rmtree(aside, ignore_errors=True)
        (self.folder / str(step)).rename(aside)

    def facts(self, step: int) -> dict:
        """The facts that were given to `save` with this step."""
        return from_first(lambda: saved_facts(self.folder / str(step)))

    def restore[State: Named](self, abstract: State, step: int | None = None) -> State:
        """The state at `step` (None: the newest), with the shapes, dtypes and shardings of `abstract`. Raises
        UserError."""
        path = self.folder / str(self.latest if step is None else step)
        return type(abstract)(**_load(path, _parts(abstract)))

    def close(self) -> None:
        """Waits until everything is on disk."""
        try:
            self.wait()
        finally:
            self._worker.shutdown()

    @contextlib.contextmanager
    def _saving(self):
        """Turns a failure of this save or of the one in the background into one UserError; complete checkpoints are
        untouched."""
        try:
            yield
        except Exception as error:  # tensorstore, orbax and the file system each raise their own types
            fix = f"could not be written ({_reason(error)}): free some space or move the run; complete ones are kept"
            raise UserError("checkpoint", str(self.folder), fix) from error

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            return self.close()
        with contextlib.suppress(Exception):  # does not wait for the other hosts, which may have failed elsewhere
            if self._pending is not None:
                self._pending[1].result()
        self._worker.shutdown()


def restore_parts(
    folder: Path, wanted: dict[str, Any], owner: dict | None = None, step: int | None = None
) -> dict[str, Any]:
    """Reads some fields of the newest state in a folder of checkpoints, or of the state at `step`. `wanted` gives the
    fields as trees of abstract arrays, which set shapes, dtypes and shardings; other fields, such as the optimizer's
    moments, are not read.

    Only reads: a run that is saving into the folder at the same time is not disturbed. Raises UserError if there is no
    checkpoint, or it is damaged, or of another step or another `owner`.
    """
    return _intact(folder, owner, step, lambda path: _load(path, wanted, partial=True))


def check_newest(folder: Path, owner: dict | None = None) -> None:
    """Raises UserError where `restore_parts` would for the newest state. Verifies every file and loads no array."""
    _intact(folder, owner, None, lambda path: None)


def _intact[Found](folder: Path, owner: dict | None, step: int | None, use: Callable[[Path], Found]) -> Found:
    """The result of `use(path)` for a checkpoint that was verified first."""
    parent, folder = Path(folder).parent, Path(folder).resolve()
    while True:
        saved = steps_saved(folder)
        if not saved:
            raise UserError("run", str(parent), "has no checkpoint yet: train it first (nagjax train)")
        if step is not None and step not in saved:
            there = f"there are checkpoints of the steps {', '.join(map(str, saved))}"
            raise UserError("step", step, f"{there}; to keep more of them train with --keep or --keep-every")
        path = folder / str(max(saved) if step is None else step)
        try:
            refuse_foreign(path, owner or {})
            verify(path)
            return use(path)
        except (Damaged, UserError) as error:
            if not os.path.lexists(path):
                continue  # the run has just replaced this checkpoint by a newer one
            raise _damaged(path, error) if isinstance(error, Damaged) else error from error


def _parts(state: Named) -> dict[str, Any]:
    """The fields of a state that are written: all but the optional fields that are empty, as in older versions'
    checkpoints."""
    defaults = getattr(state, "_field_defaults", {})
    return {name: part for name, part in state._asdict().items() if name not in defaults or jax.tree.leaves(part)}


def _load(path: Path, wanted: dict, partial: bool = False) -> dict:
    context = ocp.Context()
    context.pytree.loading.partial_load = partial
    try:
        with context:
            return ocp.load(str(path), wanted)
    except Exception as error:  # orbax and tensorstore raise their own types
        reason = _unlike(path, wanted) or _reason(error)
        fix = f"cannot be read ({reason}): it is of another model, or the code of its scheme has changed"
        raise UserError("checkpoint", str(path), fix) from error


def _unlike(path: Path, wanted: dict) -> str:
    """Names the first parameter that the checkpoint lacks or has in another shape; empty if its shapes cannot be
    read."""
    try:
        there = _shapes(ocp.metadata(str(path)).metadata["params"])
    except Exception:  # as above
        return ""
    for name, shape in _shapes(wanted.get("params", {})).items():
        if name not in there:
            return f"{name} is not in it"
        if there[name] != shape:
            return f"{name} is {list(there[name])} in it and {list(shape)} here"
    return ""


def _shapes(params: Any) -> dict[str, tuple[int, ...]]:
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return {jax.tree_util.keystr(keys, simple=True, separator="/"): tuple(leaf.shape) for keys, leaf in leaves}


def _damaged(path: Path, damage: Damaged) -> UserError:
    from_before = "train on from the one before: the run's own nagjax train command with --resume=previous"
    fix = f"is damaged: {damage}; bring it back, or {from_before}"
    return UserError("checkpoint", str(path), fix)


def _reason(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _rewrite_facts(path: Path, facts: dict) -> None:
    with contextlib.suppress(Damaged, FileNotFoundError):  # removed by hand in the meantime
        write_facts(path, facts)


def refuse_foreign(path: Path, owner: dict) -> None:
    """Raises UserError if a checkpoint's manifest names another step than its folder, or another run or other settings
    than `owner`. Only values that both name are compared: older manifests have no owner."""
    try:
        named = read_manifest(path)["owner"]
    except Damaged:
        return  # reported where the checkpoint is used
    if not isinstance(named, dict):
        named = {"step": named}
    settings, own = named.get("config"), owner.get("config", {})
    settings = settings if isinstance(settings, dict) else {}
    differ = sorted(name for name in settings.keys() & own.keys() if settings[name] != own[name])
    if "step" in named and str(named["step"]) != path.name:
        what = f"is of step {named['step']}: give it its name back"
    elif owner.get("run") and named.get("run") and named["run"] != owner["run"]:
        what = f"is of another run, {named['run']}; this one is {owner['run']}: take it out of this folder"
    elif differ:
        listed = ", ".join(f"{name} was {settings[name]!r} and is now {own[name]!r}" for name in differ)
        what = f"was saved under other settings ({listed}): the run's config was changed; bring it back"
    else:
        return
    raise UserError("checkpoint", str(path), what)


def saved_facts(path: Path) -> dict:
    """The facts that were given to `Checkpoints.save` with a checkpoint; empty if it is damaged or missing."""
    with contextlib.suppress(Damaged):  # `newest` reports the damage when it comes to use it
        return read_manifest(path)["facts"]
    return {}


def finished(folder: Path, steps: int) -> bool:
    """Whether the checkpoint of a run's last step exists and was evaluated: a stop can come between the two."""
    return steps in steps_saved(folder) and saved_facts(folder / str(steps)).get("evaluated", True)


def steps_saved(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, ascending; reads only names. Raises UserError for a
    checkpoint that is a link (it would be neither this run's nor safe to remove) and if the folder is a link that
    leads nowhere."""
    if not folder.is_dir():
        if folder.is_symlink() and not folder.exists():
            fix = "is a link that leads nowhere: mount the disk it leads to, or remove the link"
            raise UserError("checkpoint", str(folder), fix)
        return []
    found = [path for path in folder.iterdir() if path.name.isdecimal() and path.name == str(int(path.name))]
    if links := [path for path in found if path.is_symlink()]:
        raise UserError("checkpoint", str(links[0]), "is a link: put the checkpoint itself there, or remove the link")
    return sorted(int(path.name) for path in found)


def steps_aside(folder: Path) -> list[int]:
    """The steps of the checkpoints that were found damaged and renamed."""
    names = (path.name.removesuffix(DAMAGED) for path in folder.glob(f"*{DAMAGED}"))
    return sorted(int(name) for name in names if name.isdecimal() and name == str(int(name)))
