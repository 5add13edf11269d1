"""The same program in several processes of this machine, which share its cores.

Small models train faster side by side, each on cores of its own, than one after the other on all cores. Accelerators
are not shared: a process takes the whole device.
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
    """Calls `act(*args)` after so many seconds, unless the block has ended."""
    timer = threading.Timer(seconds, act, args)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def cores() -> int:
    """Of this machine that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def shared_cores(count: int) -> dict[str, str]:
    """The environment of one of so many processes that share this machine's cores."""
    return os.environ | {"NPROC": str(max(cores() // count, 1))}


def in_processes(module: str, given: Any, count: int) -> None:
    """`python -m MODULE` so many times at once, each with the JSON value `given` on its standard input. What they say
    on standard error is passed on line by line.

    Raises UserError if one fails. An interrupt and SIGTERM end all of them first, which raises Preempted after the
    latter.
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
                with contextlib.suppress(BrokenPipeError):  # of one that has ended by now, with a code
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
    """What such a process does: `main` of the value on its standard input, with a command's exit codes."""
    try:
        main(parse_json(sys.stdin.read()))
    except UserError as error:
        sys.exit(f"nagjax: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def end(workers: Sequence[subprocess.Popen]) -> list[int]:
    """Tells all that still run to save themselves and end, and waits for them: their exit codes."""
    for worker in workers:
        worker.terminate()
    return [worker.wait() for worker in workers]


@contextlib.contextmanager
def on_sigterm(handler: Callable[..., None]) -> Generator[None]:
    """Inside it SIGTERM calls the handler. Python lets only the main thread handle signals: in another one they are
    left to whoever handles them."""
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
