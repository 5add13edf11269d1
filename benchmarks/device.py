"""Everything there is to measure on an accelerator, as one command in parts of at most nine minutes.

    python benchmarks/device.py --part values --out FOLDER [--minutes 9]

Parts, in the order in which they matter: values, kernels, steps, attention, experts, mod, training, profile; `all`
takes them in turn for as long as the time lasts. A part writes FOLDER/PART.jsonl row by row: a part that is killed
loses the case it was at, and the same command goes on behind it. Every part is a process of its own, which is started
again behind a case that ended it. `--rehearse` takes shapes that a CPU finishes in seconds, and writes into
FOLDER/rehearsal. benchmarks/README.md says how to run it on a machine that has little more than jax.
"""

import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.parts.rows import REHEARSAL, note_end  # noqa: E402
from benchmarks.parts.worker import FINISHED, LEFT, NO_ACCELERATOR, PARTS  # noqa: E402

CUDA_PACKAGES = ("cu13", "cuda_nvcc")  # of NVIDIA: jax looks for its compiler in these
USUAL_CUDA = "/usr/local/cuda/bin"  # often missing from the PATH of a shell without a login
GRACE = 30.0  # seconds after the time is up within which a part may end by itself


def main(argv: list[str] | None = None) -> int:
    """Returns the number of parts that have cases left. Raises SystemExit if there is no device to measure on."""
    parser = argparse.ArgumentParser(prog="python benchmarks/device.py", description=__doc__.split("\n")[0])
    parser.add_argument("--part", action="append", choices=[*PARTS, "all"], required=True, help="may be repeated")
    parser.add_argument("--out", type=Path, required=True, help="folder of the rows")
    parser.add_argument("--minutes", type=float, default=9.0, help="no case is begun that would end later")
    parser.add_argument("--scratch", type=Path, help="for unfinished runs and traces; OUT/scratch unless given")
    parser.add_argument("--rehearse", action="store_true", help="tiny shapes, to see that everything runs")
    given = parser.parse_args(argv)

    deadline = time.monotonic() + 60 * given.minutes
    out = given.out / REHEARSAL if given.rehearse else given.out
    scratch = given.scratch or out / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    left = 0
    for part in PARTS if "all" in given.part else given.part:
        finished = measure(part, out, scratch, deadline, given.rehearse)
        print(f"{part}: {'finished' if finished else 'cases left'}", flush=True)
        left += not finished
    return left


def measure(part: str, out: Path, scratch: Path, deadline: float, rehearse: bool) -> bool:
    """Measures a part; returns whether it is finished. Its process is restarted as long as each start makes
    progress."""
    written = out / f"{part}.jsonl"
    while (seconds := deadline - time.monotonic()) > 0:
        before = written.stat().st_size if written.exists() else 0
        command = [sys.executable, "-m", "benchmarks.parts.worker", part, str(out), str(scratch), str(seconds)]
        try:
            run = subprocess.run([*command, *["rehearse"] * rehearse], env=environment(part), timeout=seconds + GRACE)
        except subprocess.TimeoutExpired:
            print(f"{part}: killed, as it had not ended {GRACE:g} s after its time", flush=True)
            if PARTS[part][1]:  # else a case that hung would have ended the process itself
                note_end(written, stopped=True)
            return False
        if run.returncode == NO_ACCELERATOR:
            raise SystemExit(1)
        if run.returncode in (FINISHED, LEFT):
            return run.returncode == FINISHED
        note_end(written, stopped=run.returncode == 0)  # exit code 0: a training that was stopped before its first step
        if not written.exists() or written.stat().st_size == before:
            print(f"{part}: ended with exit code {run.returncode} before its first case", flush=True)
            return False
    return False


def environment(part: str) -> dict[str, str]:
    """The environment variables of a part's process. Parts share the cache of compiled programs. For PyTorch's peers
    jax must leave memory on the same device; in all other parts jax reserves nearly all of it at once, because the
    pieces that one step frees may be too small for the next one."""
    own = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    if "JAX_COMPILATION_CACHE_DIR" not in own:
        own["JAX_COMPILATION_CACHE_DIR"] = str(Path(tempfile.gettempdir(), "nagjax-device-programs"))
        own.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    if (named := own.get("JAX_PLATFORMS")) and "cpu" not in named.split(","):
        own["JAX_PLATFORMS"] = f"{named},cpu"  # the CPU computes the expected values
    if "CUDA_ROOT" not in own and (root := compilers_root()):
        own["CUDA_ROOT"] = root
    if part == "kernels":
        own.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    elif "XLA_PYTHON_CLIENT_MEM_FRACTION" not in own:
        own.setdefault("XLA_CLIENT_MEM_FRACTION", "0.92")
    return own


def compilers_root() -> str | None:
    """The CUDA whose compiler is on the path, if NVIDIA's packages are installed without their compiler, as PyTorch
    installs them; else None. Without this, jax 0.11 looks for libdevice in a folder named None."""
    namespace = importlib.util.find_spec("nvidia")
    installed = [Path(folder) for folder in namespace.submodule_search_locations or ()] if namespace else []
    if not installed or any((folder / of / "bin" / "ptxas").exists() for folder in installed for of in CUDA_PACKAGES):
        return None
    nvcc = shutil.which("nvcc") or shutil.which("nvcc", path=USUAL_CUDA)
    return str(Path(nvcc).resolve().parents[1]) if nvcc else None


if __name__ == "__main__":
    sys.exit(min(main(), 1))
