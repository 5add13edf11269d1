"""The file that a part writes: one JSON line per measured case, so that a killed part loses only one case."""

import concurrent.futures
import contextlib
import functools
import gc
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from nagjax.processes import alarm

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "libtpu", "tokamax", "jax-triton", "torch", "triton"),
    *("flax", "optax", "orbax-checkpoint", "chex", "grain"),
)
TRIES = 2  # starts without an end, after which a case is skipped
ENDINGS = 2  # an implementation that ended the process so often, or hung once, is skipped for its op,
ENDINGS_IN_ALL = 6  # and after so often, for all ops
AHEAD = 8  # programs compiled in advance, in parts that allow it
COMPILED_BY_XLA = ("reference", "xla")  # their failures at one shape say nothing about others
COMPILED = {"compiled": True}  # in a case's row: its program had been compiled
AGAIN = 4  # exit code of a process that cannot measure any more
REHEARSAL = "rehearsal"  # the folder in OUT for the results of a rehearsal, which no table shows


class Case(NamedTuple):
    """A case to measure: values that name it, and the function that returns its figures (JSON values)."""

    name: dict[str, Any]
    measure: Callable[..., dict[str, Any]]
    resumes: bool = False  # it ends by itself at the deadline, and the next call continues it
    compile: Callable[[], Any] | None = None  # makes the argument of `measure`, in another thread and in advance
    limit: float | None = None  # seconds that it may take, if not those of its part


class Options(NamedTuple):
    """The options that every part is given."""

    rehearsal: bool  # shapes that a CPU finishes in seconds, only to show that everything runs
    scratch: Path  # for runs that the next call continues, and for traces
    deadline: float  # by `time.monotonic`


class Paused(Exception):
    """The time is up in the middle of a case, which the next call will continue. `partial`: its figures until then."""

    def __init__(self, partial: dict[str, Any] | None = None):
        super().__init__()
        self.partial = partial


class Unusable(Exception):
    """The device cannot compute any more in this process, for example after a kernel accessed invalid memory."""


class Rows:
    """Appends to `FOLDER/PART.jsonl`: a line with the origin at every start, a line when a case begins, and a line with
    its outcome. A case is not measured again if it has figures from this kind of device, or if it failed there with
    these sources and versions; to repeat it, delete its line or the file. A case that takes longer than `limit`
    seconds, or than its own limit, ends the process with the exit code AGAIN; without a `limit` no case does."""

    def __init__(self, part: str, folder: Path, deadline: float, limit: float | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.deadline, self.limit = folder / f"{part}.jsonl", deadline, limit
        self.lines = read(self.path)

    def run(self, cases: Iterable[Case]) -> int:
        """Measures the missing cases until the time is up. Returns the number of cases left. Raises Unusable after a
        case that has left the device unable to compute."""
        finished, begun, times = self._known()
        ended, compiling = self._ended()
        left, started = 0, False
        wanted = [case for case in cases if _key(case.name) not in finished]
        compiled = Compiled(wanted, 0 if compiling else AHEAD)  # else the culprit is unknown
        for number, case in enumerate(wanted):
            if error := _hopeless(begun[_key(case.name)], case.name, ended):
                self._append({"case": case.name, "error": error})
                print(f"{self.path.stem}: {line(case.name)}: passed over, {error}", flush=True)
                continue
            likely = times.get(_kind(case.name), (case.limit or 0.0) / 2 or next(reversed(times.values()), 0.0))
            if time.monotonic() + (0.0 if case.resumes else likely) > self.deadline:
                left += 1
                continue
            if not started:
                self._append({"origin": self.origin})
                started = True
            self._append({"case": case.name, "begun": True})
            began = time.monotonic()
            try:
                with self._limited(case):
                    given = compiled.of(number)
                    if case.compile:
                        self._append({"case": case.name, **COMPILED})
                    outcome = {"result": case.measure(*given)}
            except Paused as pause:
                self._append(
                    {"case": case.name, "paused": True, **({"partial": pause.partial} if pause.partial else {})}
                )
                left += 1
                continue
            except Exception as error:  # a kernel that fails is a result, and the next case follows
                from pallas_kernels.bench import in_one_line

                outcome = {"error": in_one_line(error)}
            taken = round(time.monotonic() - began, 2)
            if "result" in outcome:
                times.pop(_kind(case.name), None)
                times[_kind(case.name)] = taken
            gc.collect()  # frees what an error's traceback keeps on the device
            works = usable()  # after figures, too: gradients may have failed alone
            end = {} if works else {"ended": True, **_stage(last(self.path))}
            self._append({"case": case.name, **outcome, "seconds": taken, **end})
            print(f"{self.path.stem}: {line(case.name)}: {line(outcome.get('result') or outcome)}", flush=True)
            if not works:
                raise Unusable
        compiled.pool.shutdown(wait=False, cancel_futures=True)
        return left

    def _limited(self, case: Case) -> contextlib.AbstractContextManager[None]:
        limit = case.limit or self.limit
        return contextlib.nullcontext() if self.limit is None else alarm(limit, self._end, case, limit)

    def _end(self, case: Case, limit: float) -> None:
        error, stage = f"took longer than {limit:g} s", _stage(last(self.path))
        if not COMPILED.items() <= stage.items() and (case.compile or not self._ended_before(case)):
            # it may have been compiling: tried again, alone, or with what the compilers' cache has kept
            self._append({"case": case.name, "ended": True, **stage})
        else:
            self._append({"case": case.name, "error": error, "ended": True, "hung": True, **stage})
        print(f"{self.path.stem}: {line(case.name)}: {error}", flush=True)
        os._exit(AGAIN)

    def _ended_before(self, case: Case) -> bool:
        return any("ended" in row and row.get("case") == case.name for row in read(self.path))

    @functools.cached_property
    def origin(self) -> dict:
        from pallas_kernels.origin import origin, sources  # imports jax, which reading results does not need

        return origin(PACKAGES) | {"sources": sources()}

    def _known(self) -> tuple[set[str], Counter[str], dict[str, float]]:
        """The finished cases, the number of starts without an end of each case, and the latest time of each kind of
        case, the kind measured last at the end. Failures with other sources or versions do not count, because they may
        work now."""
        finished, begun, times = set(), Counter[str](), {}
        for row, as_now in self._of_this_device(self.lines):
            key, kind = _key(row["case"]), _kind(row["case"])
            if "result" in row:
                if _whole(row["result"]) or as_now:
                    finished.add(key)
                if "seconds" in row:
                    times.pop(kind, None)
                    times[kind] = row["seconds"]
            elif as_now:
                if "begun" in row:
                    begun[key] += 1
                elif "paused" in row:
                    begun[key] = 0
                elif "error" in row:
                    finished.add(key)
        return finished, begun, times

    def _ended(self) -> tuple[Counter[tuple], bool]:
        """How often each op's implementation has ended its process, in this part or another one of the same folder (a
        hang counts as ENDINGS times), and whether one of this part did so before it was compiled."""
        ended, compiling = Counter[tuple](), False
        for path in sorted(self.path.parent.glob("*.jsonl")):
            for row, as_now in self._of_this_device(read(path)):
                if as_now and "ended" in row:
                    ended[_program(row["case"])] += ENDINGS if "hung" in row else 1
                    compiling |= path == self.path and not COMPILED.items() <= row.items()
        return ended, compiling

    def _of_this_device(self, lines: list[dict]) -> Iterator[tuple[dict, bool]]:
        """The rows of cases measured on this kind of device, each with whether versions and sources were the present
        ones."""
        where: dict = {}
        for row in lines:
            where = row.get("origin", where)
            if "case" in row and self._as_now(where, "device"):
                yield row, self._as_now(where, "versions", "sources")

    def _as_now(self, where: dict, *facts: str) -> bool:
        return all(where.get(fact) == self.origin.get(fact) for fact in facts)

    def _append(self, row: dict) -> None:
        append(self.path, row)


class Compiled:
    """The arguments for the next cases' `measure`, made in threads; compilers do not hold Python's lock."""

    def __init__(self, cases: list[Case], ahead: int):
        self.cases, self.ahead, self.made = cases, ahead, {}
        self.pool = concurrent.futures.ThreadPoolExecutor(max(ahead, 1))

    def of(self, number: int) -> tuple[Any, ...]:
        """The arguments of this case's `measure`. Raises the error of making them."""
        own = self.cases[number].compile
        if own is None:
            return ()
        if not self.ahead:
            return (own(),)
        for i, case in enumerate(self.cases[number : number + self.ahead], number):
            if case.compile and i not in self.made:
                self.made[i] = self.pool.submit(case.compile)
        return (self.made.pop(number).result(),)


def usable() -> bool:
    """Whether the device still computes."""
    try:
        return int(_next()(1)) == 2
    except Exception:
        return False


@functools.cache  # compiled once per process rather than after every case
def _next() -> Callable:
    import jax

    return jax.jit(lambda x: x + 1)


def note_end(path: Path, stopped: bool) -> None:
    """Notes in a part's file that its process ended in the middle of a case: either it was `stopped`, and the case
    continues at the next start, or it ended by itself. After a kill from outside the case is only marked as begun."""
    row = last(path)
    if "begun" in row or "compiled" in row:
        append(path, {"case": row["case"], "paused" if stopped else "ended": True, **_stage(row)})


def last(path: Path) -> dict:
    """The last row of a part's file; empty if there is none."""
    return next(reversed(read(path)), {})


def _stage(row: dict) -> dict[str, bool]:
    """COMPILED if the row says so about its case, else empty."""
    return COMPILED if "compiled" in row else {}


def append(path: Path, row: dict) -> None:
    """Appends a line and syncs it to disk. If the file ends with an incomplete line, the new line is kept apart from
    it."""
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            file.write(b"" if file.read(1) == b"\n" else b"\n")
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _whole(result: dict[str, Any]) -> bool:
    """Whether a case's figures have no failed part: gradients, peers, comparison, or values."""
    failed = {"error_backward", "failed"} & result.keys()
    return not failed and result.get("vs_base", True) is not None and result.get("worst", 0.0) <= 1.0


def _hopeless(begun: int, name: dict[str, Any], ended: Counter[tuple]) -> str | None:
    """Why a case is skipped, if it is: each try costs a start of the process."""
    if begun >= TRIES:
        return f"was begun {TRIES} times and never finished"
    op, implementation = _program(name)
    if implementation in (None, *COMPILED_BY_XLA):
        return None
    if ended[op, implementation] >= ENDINGS:
        of = f"{implementation} of {op}" if op else implementation
        return f"{of} hung, or ended the process {ENDINGS} times"
    if sum(times for (_, by), times in ended.items() if by == implementation) >= ENDINGS_IN_ALL:
        return f"{implementation} hung or ended the process with several other ops"
    return None


def _program(name: dict[str, Any]) -> tuple[str | None, str | None]:
    return name.get("op"), name.get("implementation")


def _key(name: dict[str, Any]) -> str:
    return json.dumps(name, sort_keys=True)


def _kind(name: dict[str, Any]) -> str:
    """A key for the kind of a case; cases that differ only in the names in `alike` take about the same time."""
    alike = ("op", "implementation", "scheme", "kernels")
    return _key({of: None if of in alike else value for of, value in name.items()})


def read(path: Path) -> list[dict]:
    """The lines of a part's file; incomplete lines are dropped."""
    rows = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(text))
        except ValueError:
            continue
    return rows


def measured(path: Path) -> list[dict]:
    """The finished cases of a part's file, each with the `origin` of its last start."""
    found, where, begun = [], None, {}
    for row in read(path):
        where = row.get("origin", where)
        key = _key(row.get("case"))
        if "begun" in row:
            begun[key] = where
        elif "result" in row or "error" in row:
            found.append({**row, "origin": begun.get(key, where)})
    return found


def line(values: dict[str, Any]) -> str:
    """A dict as one line for the terminal."""
    shown = lambda v: f"{v:.4g}" if isinstance(v, float) else str(v)  # noqa: E731
    return " ".join(f"{name}={shown(value)}" for name, value in values.items() if not isinstance(value, dict | list))
