"""Checks that there is a device, and says what else a part may lack: `python -m benchmarks.parts.check`.

Takes a few seconds; to be run before the first part on a machine where the parts have never run.
"""

import importlib
import sys
import sysconfig
import traceback
from pathlib import Path

import jax

from benchmarks.device import compilers_root
from benchmarks.parts.rows import PACKAGES
from benchmarks.parts.worker import PARTS
from pallas_kernels.origin import commit, versions

IN_FUNCTIONS = ("grain", "tokenizers")  # packages that a training imports inside functions


def main() -> int:
    """Returns 1 if jax sees no accelerator, else 0: a part that cannot be imported ends by itself, and the others are
    measured."""
    print("check:", ", ".join(f"{name} {has}" for name, has in versions(PACKAGES).items() if has), flush=True)
    parts = dict.fromkeys(f"benchmarks.parts.{where.partition('.')[0]}" for where, _ in PARTS.values())
    for name in (*parts, *IN_FUNCTIONS):
        try:
            importlib.import_module(name)
        except Exception:
            traceback.print_exc()
            print(f"check: {name} cannot be imported, see above: what needs it is not measured", flush=True)
    sources = len(list(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")))
    print(f"check: code {commit()}, compilers in {compilers_root()}, {sources} modules to train on", flush=True)
    seen = jax.devices()
    print(f"check: jax sees {len(seen)} x {seen[0].device_kind} ({seen[0].platform})", flush=True)
    if seen[0].platform == "cpu":
        print("check: jax sees no accelerator: nothing is measured", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
