"""Device time of a program, and the bandwidth that a plain copy reaches on the same device."""

import functools
import math
import statistics
import time
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

# More than the last-level cache of any current accelerator (H200: 50 MB), so that no operand is in cache.
ROTATE_BYTES = 512 * 2**20
MOST_SETS = 8
MOST_CALLS = 64  # calls of the function in a program
PROGRAM_BYTES = 2 * 2**30  # bytes that a program visits, if MOST_CALLS allows it
PROGRAM_SECONDS = 3e-4  # least seconds of a program
AHEAD = 2  # calls by which the host must be ahead of the device
ROUND_SECONDS = 0.02
WARM_SECONDS = 0.1  # seconds in which an idle device reaches its clock


class Taken(NamedTuple):
    """The median time of one call. `by_host`: the device had to wait for the host, so that this is the host's time to
    start a call."""

    seconds: float
    by_host: bool

    def over(self, calls: int) -> "Taken":
        return Taken(self.seconds / calls, self.by_host)


def size(tree: object) -> int:
    """Bytes of all arrays (or shapes) in a pytree."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def timed(fn: Callable, make_args: Callable[[jax.Array], tuple], *, rotate: int, repeats: int) -> Taken:
    """The time of one `fn(*args)` on the device.

    One program calls `fn` on several sets of arguments in turn, at most MOST_SETS, so that together they exceed
    `rotate` bytes if possible. It repeats this until it has visited PROGRAM_BYTES or, on a faster device, takes
    PROGRAM_SECONDS, with at most MOST_CALLS calls. The program is timed by `queued`. Barriers between the calls prevent
    fusion and overlap. All results are returned, so that none is written to memory that is still in a cache. With
    `rotate` = 0 (a CPU) the program calls `fn` once.
    """
    first = make_args(jax.random.key(0))
    each = size((first, jax.eval_shape(fn, *first)))
    sets = max(1, min(MOST_SETS, math.ceil(rotate / each)))
    args = [first, *(make_args(jax.random.key(i)) for i in range(1, sets))]
    visits = max(min(math.ceil(PROGRAM_BYTES / each), MOST_CALLS) // sets, 1) if rotate else 1

    @functools.partial(jax.jit, static_argnums=1)
    def program(args, visits):
        outs = []
        for each in args * visits:
            if outs:
                each, outs[-1] = jax.lax.optimization_barrier((each, outs[-1]))
            outs.append(fn(*each))
        return outs

    run = Running(lambda: program(args, visits))
    run(1)  # compiles
    if rotate and (once := warmed(run)) < PROGRAM_SECONDS and sets * visits < MOST_CALLS:
        visits *= min(math.ceil(PROGRAM_SECONDS / once), MOST_CALLS // (sets * visits))
        run(1)
    found = queued(run, repeats).over(sets * visits)
    return found if rotate else found._replace(by_host=False)


class Running:
    """`run(times)`: the seconds until the results of that many calls are computed. `by_host`: whether the device was
    done as soon as the host had started the last one of them."""

    def __init__(self, call: Callable[[], object]):
        self.call, self.by_host = call, False

    def __call__(self, times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            out = self.call()
        started = time.perf_counter()
        jax.block_until_ready(out)
        end = time.perf_counter()
        calls_left = (end - started) / (end - start) * times
        self.by_host = calls_left < min(AHEAD, times / 2)
        return end - start


def warmed(run: Callable[[int], float]) -> float:
    """Seconds of one call, on a device that has reached its clock. `run(times)` gives the seconds of that many
    calls."""
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_SECONDS:
        each = run(2) / 2
    return each


def queued(run: Running, repeats: int) -> Taken:
    """The time of one call. So many calls (ROUND_SECONDS of work) are queued that the device waits for the host only if
    the host needs longer to start a call than the device to run it."""
    times = max(1, math.ceil(ROUND_SECONDS / run(2) * 2))
    rounds = [Taken(run(times), run.by_host) for _ in range(repeats)]
    typical = Taken(statistics.median(one.seconds for one in rounds), statistics.mode(one.by_host for one in rounds))
    return typical.over(times)


def taken(call: Callable[[], object], repeats: int) -> Taken:
    """The time of a compiled function, on a device that has reached its clock."""
    run = Running(call)
    run(1)  # compiles
    warmed(run)
    return queued(run, repeats)


def seconds(call: Callable[[], object], repeats: int) -> float:
    """`taken`, for what takes a device long enough that the host's time cannot matter."""
    return taken(call, repeats).seconds


def copy_bandwidth(*, rotate: int, repeats: int) -> float:
    """GB/s of reading an [N, D] array and writing another one (its negative, which no compiler can skip)."""
    shape = (16384, 8192) if rotate else (2048, 640)
    each = timed(
        jnp.negative,
        lambda key: (jax.random.normal(key, shape, jnp.bfloat16 if rotate else jnp.float32),),
        rotate=rotate,
        repeats=repeats,
    )
    return 2 * math.prod(shape) * (2 if rotate else 4) / each.seconds / 1e9
