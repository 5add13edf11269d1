"""Freed memory stays with the process, so that a step's pages are not zeroed again."""

import importlib
import subprocess
import sys

import pytest

from nagjax.cli import run

PROGRAM = """
import ctypes, resource, sys, threading
from nagjax.memory import keep_freed_memory
if sys.argv[1] == "keep" and not keep_freed_memory():
    raise SystemExit(3)
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
size = 100 * 2**20

def use():
    memory = libc.malloc(size)
    ctypes.memset(memory, 1, size)
    libc.free(memory)

def faults(times):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(times):
        thread = threading.Thread(target=use)
        thread.start()
        thread.join()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

faults(1)
print(faults(3) * resource.getpagesize() / (3 * size))
"""


def touched_again(how: str) -> float:
    """Of a buffer that was freed and allocated again, the share of pages that the kernel had to map."""
    done = subprocess.run([sys.executable, "-c", PROGRAM, how], capture_output=True, text=True)
    if done.returncode == 3:
        pytest.skip("this C library has no mallopt")
    assert done.returncode == 0, done.stderr
    return float(done.stdout)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc")
def test_freed_memory_is_used_again_by_any_thread():
    assert touched_again("keep") < 0.1


class Asked(Exception):
    """Freed memory was asked to stay."""


@pytest.mark.parametrize(
    "command",
    ["train", "profile", "bench step", "bench mod", "demo --out {}/demo", "prune {} --count 1 --out {}/less"],
)
def test_every_command_that_takes_steps_keeps_freed_memory(command, tmp_path, monkeypatch):
    """A profile without it showed 32% of a step in zeroed pages that no training has."""

    def asked():
        raise Asked

    words = command.format(*[tmp_path] * 2).split()
    module = importlib.import_module("nagjax.demo" if words[0] == "demo" else f"nagjax.commands.{words[0]}")
    monkeypatch.setattr(module, "keep_freed_memory", asked)
    with pytest.raises(Asked):
        run(words)
