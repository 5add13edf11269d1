"""Runs one part in its own process: `python -m benchmarks.parts.worker PART OUT SCRATCH SECONDS [rehearse]`.

The exit code tells `benchmarks/device.py` the outcome: FINISHED; LEFT; AGAIN if this process cannot measure any more
and another one has to continue the part; or NO_ACCELERATOR. A training that is stopped before its first step exits with
0.
"""

import importlib
import os
import sys
import time
from pathlib import Path

import jax

from benchmarks.parts.rows import AGAIN, Options, Rows, Unusable

LEFT = 3  # the time is up, and cases remain
FINISHED = 5
NO_ACCELERATOR = 6  # jax sees none, and CPUs are for rehearsals only
# Each part's generator of cases, in order of importance, and the limit for one of its cases in seconds: a kernel that
# never returns would otherwise use up all the time.
PARTS = {
    "values": ("values.cases", 90.0),  # the first case waits for all compilations made in advance
    "kernels": ("kernels.cases", 55.0),
    "steps": ("steps.cases", 240.0),
    "attention": ("attention.cases", 120.0),
    "experts": ("experts.cases", 120.0),
    "mod": ("steps.routed_cases", 240.0),
    "training": ("training.cases", None),  # it ends in time by itself
    "profile": ("profile.cases", 240.0),
}


def main(part: str, out: str, scratch: str, seconds: str, *rehearse: str) -> int:
    deadline, (where, limit) = time.monotonic() + float(seconds), PARTS[part]
    if not rehearse and (seen := jax.devices()[0]).platform == "cpu":
        print(
            f"{part}: jax sees no accelerator, only {seen.device_kind}: see its warnings, or give --rehearse",
            flush=True,
        )
        return NO_ACCELERATOR
    module, generator = where.split(".")
    cases = getattr(importlib.import_module(f"benchmarks.parts.{module}"), generator)
    rows = Rows(part, Path(out), deadline, None if rehearse else limit)
    try:
        left = rows.run(cases(Options(bool(rehearse), Path(scratch), deadline)))
    except Unusable:
        os._exit(AGAIN)  # an orderly exit of the libraries would wait for the device
    print(f"{part}: {left} cases left" if left else f"{part}: all cases are there", flush=True)
    return LEFT if left else FINISHED


if __name__ == "__main__":
    code = main(*sys.argv[1:])
    if PARTS[sys.argv[1]][1]:  # else Python waits for compilations in advance
        sys.stdout.flush()
        os._exit(code)
    sys.exit(code)
