"""The file a part writes: one JSON line per measured case, so that a killed part loses one case."""

import concurrent.futures
import contextlib
import functools
import gc
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

from nagjax.processes import alarm

PACKAGES = (
    *("jax", "jaxlib", "jax-cuda13-plugin", "nvidia-cudnn-cu13", "libtpu", "tokamax", "jax-triton", "torch", "triton"),
    *("flax", "optax", "orbax-checkpoint", "chex", "grain"),
)
TRIES = 2  # a case that was begun so often and never finished is passed over
ENDINGS = 3  # so are all cases of a kernel that has ended the process so often
AHEAD = 8  # programs that are compiled before they are needed, where a part lets them
COMPILED_BY_XLA = ("reference", "xla")  # whose shapes have nothing to do with each other
AGAIN = 4  # exit code of a process that can measure nothing more
REHEARSAL = "rehearsal"  # the folder in OUT of what a rehearsal writes, which no table shows


class Case(NamedTuple):
    """What is measured: values that name it, and the function that returns its figures (JSON values)."""

    name: dict[str, Any]
    measure: Callable[..., dict[str, Any]]
    resumes: bool = False  # it ends by itself at the deadline, and the next call goes on from there
    compile: Callable[[], Any] | None = None  # what `measure` is given, made ahead by other threads


class Options(NamedTuple):
    """What every part is told."""

    rehearsal: bool  # shapes that a CPU finishes in seconds: that everything runs, and nothing else, is shown
    scratch: Path  # for runs that go on at the next call, and traces
    deadline: float  # by `time.monotonic`


class Paused(Exception):
    """The time is up in the middle of a case that goes on where it stopped at the next call."""


class Unusable(Exception):
    """The device computes nothing more in this process, as after a kernel's access to memory that is not its own."""


class Rows:
    """Appends to `FOLDER/PART.jsonl`: a line of origin for every start, one line when a case begins, one with what came
    of it. A case that has figures from this kind of device is not measured again, nor one that failed there with these
    sources and versions; delete the line, or the file, to do so. A case that takes longer than `limit` seconds
    ends the process, with AGAIN for its exit code."""

    def __init__(self, part: str, folder: Path, deadline: float, limit: float | None = None):
        folder.mkdir(parents=True, exist_ok=True)
        self.path, self.deadline, self.limit = folder / f"{part}.jsonl", deadline, limit
        self.lines = read(self.path)

    def run(self, cases: Iterable[Case]) -> int:
        """Measures what is not there yet, until the time is up. Returns how many cases are left. Raises Unusable after
        a case behind which nothing computes any more."""
        finished, begun, ended, times = self._known()
        left, started = 0, False
        wanted = [case for case in cases if _key(case.name) not in finished]
        compiled = Compiled(wanted, 0 if ended.total() else AHEAD)  # or nobody knows whose compilation ends the process
        for number, case in enumerate(wanted):
            if error := _hopeless(begun[_key(case.name)], case.name.get("implementation"), ended):
                self._append({"case": case.name, "error": error})
                print(f"{self.path.stem}: {line(case.name)}: passed over, {error}", flush=True)
                continue
            likely = times.get(_kind(case.name), next(reversed(times.values()), 0.0))
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
                    outcome = {"result": case.measure(*compiled.of(number))}
            except Paused:
                self._append({"case": case.name, "paused": True})
                left += 1
                continue
            except Exception as error:  # a kernel that fails is a result of this run, and the next case goes on
                from pallas_kernels.bench import in_one_line

                outcome = {"error": in_one_line(error)}
            taken = round(time.monotonic() - began, 2)
            if "result" in outcome:
                times.pop(_kind(case.name), None)
                times[_kind(case.name)] = taken
            gc.collect()  # what an error's traceback keeps on the device
            works = usable()  # also behind figures: gradients may have failed alone
            self._append({"case": case.name, **outcome, "seconds": taken} | ({} if works else {"ended": True}))
            print(f"{self.path.stem}: {line(case.name)}: {line(outcome.get('result') or outcome)}", flush=True)
            if not works:
                raise Unusable
        compiled.pool.shutdown(wait=False, cancel_futures=True)
        return left

    def _limited(self, case: Case) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.limit is None else alarm(self.limit, self._end, case)

    def _end(self, case: Case) -> None:
        error = f"took longer than {self.limit:g} s"
        self._append({"case": case.name, "error": error, "ended": True})
        print(f"{self.path.stem}: {line(case.name)}: {error}", flush=True)
        os._exit(AGAIN)

    @functools.cached_property
    def origin(self) -> dict:
        from pallas_kernels.origin import origin, sources  # starts jax, which reading results does not need

        return origin(PACKAGES) | {"sources": sources()}

    def _known(self) -> tuple[set[str], Counter[str], Counter[str | None], dict[str, float]]:
        """The cases that are finished, how often each was begun without an end, how often an implementation has ended
        its process, and the latest time of each kind, the kind measured last at the end. What failed with other
        sources or versions may work now."""
        finished, begun, ended, times = set(), Counter[str](), Counter[str | None](), {}
        where: dict = {}
        for row in self.lines:
            where = row.get("origin", where)
            if "case" not in row or not self._as_now(where, "device"):
                continue
            key, kind = _key(row["case"]), _kind(row["case"])
            if "result" in row:
                if _whole(row["result"]) or self._as_now(where, "versions", "sources"):
                    finished.add(key)
                if "seconds" in row:
                    times.pop(kind, None)
                    times[kind] = row["seconds"]
            elif self._as_now(where, "versions", "sources"):
                ended[row["case"].get("implementation")] += "ended" in row
                if "begun" in row:
                    begun[key] += 1
                elif "paused" in row:
                    begun[key] = 0
                elif "error" in row:
                    finished.add(key)
        return finished, begun, ended, times

    def _as_now(self, where: dict, *facts: str) -> bool:
        return all(where.get(fact) == self.origin.get(fact) for fact in facts)

    def _append(self, row: dict) -> None:
        append(self.path, row)


class Compiled:
    """What the cases that come next are given, made by as many threads: compilers work outside of Python's lock."""

    def __init__(self, cases: list[Case], ahead: int):
        self.cases, self.ahead, self.made = cases, ahead, {}
        self.pool = concurrent.futures.ThreadPoolExecutor(max(ahead, 1))

    def of(self, number: int) -> tuple[Any, ...]:
        """The arguments of this case's `measure`. Raises what making them raised."""
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
    import jax

    try:
        return int(jax.jit(lambda x: x + 1)(1)) == 2
    except Exception:
        return False


def note_end(path: Path, stopped: bool) -> None:
    """Notes in a part's file that the process which wrote it ended in the middle of a case: `stopped`, and the case
    goes on at the next start, or by itself. One that was killed from outside leaves a case that was begun."""
    last = next(reversed(read(path)), {})
    if "begun" in last:
        append(path, {"case": last["case"], "paused" if stopped else "ended": True})


def append(path: Path, row: dict) -> None:
    """Writes a line to the disk, apart from a half-written one that it may stand behind."""
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END):
            file.seek(-1, os.SEEK_END)
            file.write(b"" if file.read(1) == b"\n" else b"\n")
        file.write(json.dumps(row).encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _whole(result: dict[str, Any]) -> bool:
    """Whether nothing in a case's figures failed: its gradients, what it is set beside, or its values."""
    return (
        "error_backward" not in result and result.get("vs_base", True) is not None and result.get("worst", 0.0) <= 1.0
    )


def _hopeless(begun: int, implementation: str | None, ended: Counter[str | None]) -> str | None:
    """Why a case is passed over: each try costs a start of the process."""
    if begun >= TRIES:
        return f"was begun {TRIES} times and never finished"
    if implementation not in (None, *COMPILED_BY_XLA) and ended[implementation] >= ENDINGS:
        return f"{implementation} ended the process {ENDINGS} times"
    return None


def _key(name: dict[str, Any]) -> str:
    return json.dumps(name, sort_keys=True)


def _kind(name: dict[str, Any]) -> str:
    """Cases that differ in these alone take about the same time."""
    alike = ("op", "implementation", "scheme", "kernels")
    return _key({of: None if of in alike else value for of, value in name.items()})


def read(path: Path) -> list[dict]:
    """The lines of a part's file; a half-written last line is dropped."""
    rows = []
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            rows.append(json.loads(text))
        except ValueError:
            continue
    return rows


def measured(path: Path) -> list[dict]:
    """The finished cases of a part's file, each with the `origin` under which it was last begun."""
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
    """A dict in one line for the terminal."""
    shown = lambda v: f"{v:.4g}" if isinstance(v, float) else str(v)  # noqa: E731
    return " ".join(f"{name}={shown(value)}" for name, value in values.items() if not isinstance(value, dict | list))
