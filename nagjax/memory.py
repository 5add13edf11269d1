"""The memory of a training step on a CPU, kept from step to step.

XLA:CPU asks for a step's temporary buffers anew each time. glibc maps a large request and unmaps it when it is freed,
so that the kernel zeroes every page of it in every step: a quarter of the CPU time of a small model.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of malloc.h
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Let what is freed stay with this process for the next request; whether the C library is one that can (glibc).

    For a process that trains, before jax starts its threads: the arenas that they have by then are mapped anew in every
    step. One arena, since those of threads are mapped.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(M_ARENA_MAX, 1), mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, NEVER)])
