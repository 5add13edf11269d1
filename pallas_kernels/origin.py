"""The origin of a measurement: device, versions, commit and date, with which every file of results begins."""

import datetime
import functools
import hashlib
import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
from collections.abc import Iterable

import jax

CODE = ("nagjax", "pallas_kernels", "experiments/*.py", "experiments/harness", "benchmarks/*.py", "benchmarks/parts")
PACKAGES = ("nagjax", "jax", "jaxlib", "flax", "optax", "numpy", "scipy")
# The widest first: programs for a CPU are compiled for its vector instructions, and round accordingly.
VECTORS = {"amx_tile": "AMX", "avx512f": "AVX-512", "avx2": "AVX2", "avx": "AVX", "sse4_2": "SSE4.2", "sve": "SVE"}


def origin(packages: Iterable[str] = PACKAGES) -> dict:
    """Device, number of devices, the host's architecture and usable cores, its CPU, versions, commit, date (UTC)."""
    device = jax.devices()[0]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "device": device.device_kind,
        "platform": device.platform,
        "devices": jax.device_count(),
        "host": f"{platform.machine()}, {cores} cores",
        "cpu": processor(),
        "versions": {"python": platform.python_version()} | versions(packages),
        "commit": commit(),
        "date": now(),
    }


def now() -> str:
    """The date and time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def processor() -> str:
    """The host's CPU model and its widest vector instructions; only the architecture if the system tells no more."""
    try:
        text = pathlib.Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine()
    lines = (line.partition(":") for line in text.splitlines())
    known = {name.strip().lower(): value.strip() for name, _, value in lines}
    flags = known.get("flags", known.get("features", "")).split()
    widest = next((shown for flag, shown in VECTORS.items() if flag in flags), None)
    model = known.get("model name") or platform.machine()
    return f"{model}, {widest}" if widest else model


def versions(packages: Iterable[str]) -> dict[str, str | None]:
    """Versions of these packages; None for a package that is not installed, such as one that is run from a checkout."""

    def one(name: str) -> str | None:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            return None

    return {name: one(name) for name in packages}


@functools.cache
def commit() -> str | None:
    """The commit of the checkout that contains this code, with "-dirty" if the code differs from it; None outside of a
    checkout. For a copy without history the environment variable NAGJAX_COMMIT gives the commit. If it ends in `+` and
    the commit's `sources`, "-dirty" is added when the code has changed."""
    if told := os.environ.get("NAGJAX_COMMIT"):
        name, _, digest = told.partition("+")
        return f"{name}-dirty" if digest not in ("", sources()) and not name.endswith("-dirty") else name
    folder = pathlib.Path(__file__).parents[1]
    if not (folder / ".git").exists() or not shutil.which("git"):
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True).stdout.strip()

    name = git("rev-parse", "--short", "HEAD")
    changed = git("status", "--porcelain", "--", *(f":(glob){pattern}" for pattern in CODE))
    return (f"{name}-dirty" if changed else name) or None


def sources() -> str:
    """The first 12 digits of a SHA-256 of all Python files of CODE, with their names."""
    folder, digest = pathlib.Path(__file__).parents[1], hashlib.sha256()
    found = (path for pattern in CODE for path in folder.glob(pattern))
    files = {file for path in found for file in (path.rglob("*.py") if path.is_dir() else [path])}
    for file in sorted(files):
        digest.update(f"{file.relative_to(folder).as_posix()}\0".encode() + file.read_bytes() + b"\0")
    return digest.hexdigest()[:12]
