"""Device time of a program, and the bandwidth that a plain copy reaches on the same device."""

import math
import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

# More than the last-level cache of any current accelerator (H200: 50 MB), so that no operand is in cache.
ROTATE_BYTES = 512 * 2**20
MOST_SETS = 8
MOST_CALLS = 64  # calls of the function in a program
PROGRAM_BYTES = 2 * 2**30  # bytes that a program visits, if MOST_CALLS allows it
PROGRAM_SECONDS = 3e-4  # least seconds of a program, many times what the host takes to start it
ROUND_SECONDS = 0.02
WARM_SECONDS = 0.1  # seconds in which an idle device reaches its clock


def size(tree: object) -> int:
    """Bytes of all arrays (or shapes) in a pytree."""
    return sum(math.prod(x.shape) * jnp.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))


def microseconds(fn: Callable, make_args: Callable[[jax.Array], tuple], *, rotate: int, repeats: int) -> float:
    """Median time of one `fn(*args)` on the device, in microseconds.

    One program calls `fn` on several sets of arguments in turn, at most MOST_SETS, so that together they exceed
    `rotate` bytes if possible. It repeats this until it has visited PROGRAM_BYTES or, on a faster device, takes
    PROGRAM_SECONDS, with at most MOST_CALLS calls. The program is timed by `queued`. Barriers between the calls prevent
    fusion and overlap. With `rotate` = 0 (a CPU) the program calls `fn` once.
    """
    first = make_args(jax.random.key(0))
    each = size((first, jax.eval_shape(fn, *first)))
    sets = max(1, min(MOST_SETS, math.ceil(rotate / each)))
    args = [first, *(make_args(jax.random.key(i)) for i in range(1, sets))]
    if rotate:
        args *= max(min(math.ceil(PROGRAM_BYTES / each), MOST_CALLS) // sets, 1)

    @jax.jit
    def program(args):
        outs = []
        for each in args:
            if outs:
                each, outs[-1] = jax.lax.optimization_barrier((each, outs[-1]))
            outs.append(fn(*each))
        return outs

    run = running(lambda: program(args))
    run(1)  # compiles
    if rotate and (taken := warmed(run)) < PROGRAM_SECONDS and len(args) < MOST_CALLS:
        args *= min(math.ceil(PROGRAM_SECONDS / taken), MOST_CALLS // len(args))
        run(1)
    return queued(run, repeats) / len(args) * 1e6


def running(call: Callable[[], object]) -> Callable[[int], float]:
    """A function `run(times)`: the seconds until the results of that many calls are computed."""

    def run(times: int) -> float:
        start = time.perf_counter()
        for _ in range(times):
            out = call()
        jax.block_until_ready(out)
        return time.perf_counter() - start

    return run


def warmed(run: Callable[[int], float]) -> float:
    """Seconds of one call, on a device that has reached its clock. `run(times)` gives the seconds of that many
    calls."""
    began = time.perf_counter()
    while time.perf_counter() - began < WARM_SECONDS:
        each = run(2) / 2
    return each


def queued(run: Callable[[int], float], repeats: int) -> float:
    """Median seconds of one call. So many calls (ROUND_SECONDS of work) are queued that the device never waits for the
    host."""
    times = max(1, math.ceil(ROUND_SECONDS / run(2) * 2))
    return statistics.median(run(times) for _ in range(repeats)) / times


def seconds(call: Callable[[], object], repeats: int) -> float:
    """Median seconds of a compiled function, on a device that has reached its clock."""
    run = running(call)
    run(1)  # compiles
    warmed(run)
    return queued(run, repeats)


def copy_bandwidth(*, rotate: int, repeats: int) -> float:
    """GB/s of reading an [N, D] array and writing another one (its negative, which no compiler can skip)."""
    shape = (16384, 8192) if rotate else (2048, 640)
    taken = microseconds(
        jnp.negative,
        lambda key: (jax.random.normal(key, shape, jnp.bfloat16 if rotate else jnp.float32),),
        rotate=rotate,
        repeats=repeats,
    )
    return 2 * math.prod(shape) * (2 if rotate else 4) / taken / 1e3
