"""Functions that give all hosts of a run the same result. All hosts must call them in the same order.

No training step may be running during a call. With one process nothing is sent.
"""

import json
from collections.abc import Callable
from typing import Any, cast

import jax
import numpy as np
from jax.experimental import multihost_utils

from nagjax.errors import UserError
from nagjax.json_reader import parse_json

BLOCK = 1024  # bytes


class OtherHost(RuntimeError):
    """An error on another host."""


def together[Result](do: Callable[[], Result]) -> Result:
    """Calls `do` on every host. If it fails on any host, all hosts raise: those on which it failed raise their own
    error, the others raise the error of the first host on which it failed.

    `do` must not itself wait for other hosts.
    """
    if jax.process_count() == 1:
        return do()
    failure, result = None, cast(Any, None)
    try:
        result = do()
    except Exception as error:
        failure = error
    told = _exchange(None if failure is None else _told(failure))
    if failure is not None:
        raise failure
    if failed := [(host, what) for host, what in enumerate(told) if what is not None]:
        raise _error(*failed[0])
    return result


def from_first(do: Callable[[], Any]) -> Any:
    """Calls `do` on the first host only, and returns its result (JSON values) or raises its error on all hosts."""
    if jax.process_count() == 1:
        return do()
    failure, message = None, None
    if jax.process_index() == 0:
        try:
            message = {"result": do()}
        except Exception as error:
            failure, message = error, {"error": _told(error)}
    message = _exchange(message)[0]
    if failure is not None:
        raise failure
    if "error" in message:
        raise _error(0, message["error"])
    return message["result"]


def _exchange(message: Any) -> list[Any]:
    """The messages (JSON values) of all hosts, in the order of the hosts."""
    content = np.frombuffer(json.dumps(message).encode(), np.uint8)
    sizes = multihost_utils.process_allgather(np.int32(content.size)).reshape(-1)
    padded = np.zeros(-(-int(sizes.max()) // BLOCK) * BLOCK, np.uint8)  # rounded up: each size is compiled
    padded[: content.size] = content
    rows = multihost_utils.process_allgather(padded)
    return [parse_json(row[:size].tobytes(), lenient=True) for row, size in zip(rows, sizes, strict=True)]


def _told(error: Exception) -> list:
    if isinstance(error, UserError):
        value = error.value if isinstance(error.value, bool | int | float | None) else str(error.value)
        return [error.field, value, error.fix]
    return [f"{type(error).__name__}: {error}"]


def _error(host: int, told: list) -> Exception:
    return UserError(*told) if len(told) == 3 else OtherHost(f"on host {host}: {told[0]}")
