"""Keeps the memory of a training step on a CPU from step to step.

XLA:CPU requests a step's temporary buffers anew each time. glibc maps a large request and unmaps it when it is freed,
so that the kernel zeroes all its pages in every step: a quarter of the CPU time of a small model.
"""

import ctypes
import sys

M_TRIM_THRESHOLD, M_MMAP_MAX, M_ARENA_MAX = -1, -4, -8  # of malloc.h
NEVER = 2**31 - 1


def keep_freed_memory() -> bool:
    """Lets freed memory stay with this process for later requests. Returns whether this worked, which needs glibc.

    Call it in a process that trains, before jax starts its threads: arenas that threads already have are mapped anew in
    every step. It allows a single arena, since the arenas of threads are mapped.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    return all([mallopt(M_ARENA_MAX, 1), mallopt(M_MMAP_MAX, 0), mallopt(M_TRIM_THRESHOLD, NEVER)])
