"""On what, with what and at which commit something was measured."""

import datetime
import functools
import importlib.metadata
import os
import platform
import subprocess
from pathlib import Path

import jax

from pallas_kernels.timing import processor

PACKAGES = ("nagjax", "jax", "jaxlib", "flax", "optax", "numpy", "scipy")
CODE = ("nagjax", "pallas_kernels", "experiments/*.py", "experiments/harness")


def origin() -> dict:
    """Device, number of devices and of usable cores, the CPU's model, versions, commit ("-dirty" if the code differs
    from it), date."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "host": f"{platform.machine()}, {cores} cores",
        "cpu": processor(),
        "versions": {"python": platform.python_version()} | {p: importlib.metadata.version(p) for p in PACKAGES},
        "commit": commit(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


@functools.cache
def commit() -> str | None:
    """None outside of a checkout."""
    folder = Path(__file__).parents[2]
    if not (folder / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        found = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True)
        return found.stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--", *CODE)
    return (f"{name}-dirty" if changed else name) or None
