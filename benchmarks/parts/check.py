"""Checks that the parts can be imported and that there is a device: `python -m benchmarks.parts.check`.

Takes a few seconds; to be run before the first part on a machine where the parts have never run.
"""

import importlib
import sys
import traceback

import jax

from benchmarks.parts.rows import PACKAGES
from benchmarks.parts.worker import PARTS
from pallas_kernels.origin import versions

IN_FUNCTIONS = ("grain", "tokenizers")  # packages that a training imports inside functions


def main() -> int:
    """Returns 0 if a part can begin, else 1, and prints why."""
    print("check:", ", ".join(f"{name} {has}" for name, has in versions(PACKAGES).items() if has), flush=True)
    parts = dict.fromkeys(f"benchmarks.parts.{where.partition('.')[0]}" for where, _ in PARTS.values())
    for name in (*parts, *IN_FUNCTIONS):
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
            print(f"check: {name} cannot be imported, see above: nothing is measured", flush=True)
            return 1
    seen = jax.devices()
    print(f"check: jax sees {len(seen)} x {seen[0].device_kind} ({seen[0].platform})", flush=True)
    if seen[0].platform == "cpu":
        print("check: jax sees no accelerator: nothing is measured", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
