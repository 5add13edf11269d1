"""Runs one program in several processes of this machine, which share its cores.

Small models train faster side by side, each on its own cores, than one after the other on all cores. Accelerators are
not shared: a process takes the whole device.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Generator, Sequence
from typing import Any

from nagjax.errors import Preempted, UserError
from nagjax.json_reader import parse_json


@contextlib.contextmanager
def alarm(seconds: float, act: Callable, *args) -> Generator[None]:
    """Calls `act(*args)` after this many seconds, unless the block has ended by then."""
    timer = threading.Timer(seconds, act, args)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def cores() -> int:
    """The number of this machine's cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_cores(count: int) -> dict[str, str]:
    """The environment of each of `count` processes that share this machine's cores."""
    return os.environ | {"NPROC": str(max(cores() // count, 1))}


def in_processes(module: str, given: Any, count: int) -> None:
    """Runs `python -m MODULE` in `count` processes at once. Each gets the JSON value `given` on its standard input.
    Their standard error is passed on line by line.

    Raises UserError if one fails. An interrupt or SIGTERM first ends all of them; then KeyboardInterrupt or Preempted
    is raised.
    """
    command, errors = [sys.executable, "-m", module], {"stderr": subprocess.PIPE, "text": True}
    with on_sigterm(_preempted):
        workers = [
            subprocess.Popen(command, env=shared_cores(count), stdin=subprocess.PIPE, **errors) for _ in range(count)
        ]
        tellers = [threading.Thread(target=_pass_on, args=(worker.stderr,), daemon=True) for worker in workers]
        try:
            for worker, teller in zip(workers, tellers, strict=True):
                teller.start()
                with contextlib.suppress(BrokenPipeError):  # the process has already ended; its exit code tells why
                    worker.stdin.write(json.dumps(given))
                    worker.stdin.close()
            codes = [worker.wait() for worker in workers]
        finally:
            end(workers)
            for teller in tellers:
                teller.join(timeout=5.0)
    if failed := [code for code in codes if code]:
        raise UserError("processes", count, f"one ended with exit code {failed[0]}: see above, and start again")


def as_worker(main: Callable[[Any], None]) -> None:
    """Runs such a process: calls `main` with the value on its standard input, and exits with a command's exit codes."""
    try:
        main(parse_json(sys.stdin.read()))
    except UserError as error:
        sys.exit(f"nagjax: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def end(workers: Sequence[subprocess.Popen]) -> list[int]:
    """Tells all processes that still run to save themselves and end, waits for them, and returns all exit codes."""
    for worker in workers:
        worker.terminate()
    return [worker.wait() for worker in workers]


@contextlib.contextmanager
def on_sigterm(handler: Callable[..., None]) -> Generator[None]:
    """Inside this context SIGTERM calls the handler. Python allows only the main thread to set one; in other threads
    nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _preempted(*_: Any) -> None:
    raise Preempted


def _pass_on(lines) -> None:
    for line in lines:
        print(line, end="", file=sys.stderr, flush=True)
