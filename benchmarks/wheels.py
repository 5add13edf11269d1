"""Gathers the packages that a bare machine lacks into one folder, as wheels: `python benchmarks/wheels.py`.

The folder is carried to a machine that reaches no package index and installed there without one; benchmarks/README.md
has the command. Versions are those of constraints.txt. It names the commit, too: make it anew after one. Results of
code that was changed since have "-dirty" behind its name.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from pallas_kernels.origin import commit, sources  # noqa: E402

# The packages that nagjax imports and that an image with jax, flax, optax, orbax, chex and torch lacks; then those
# packages of the image that are pure Python, in the versions that the tests use: the image has their dependencies.
PACKAGES = ("grain", "array_record", "portpicker", "flax", "optax", "orbax-checkpoint", "chex")
COMMIT = "COMMIT"  # file with commit and sources' hash, for copies without history
PLATFORMS = ("_2_39", "_2_34", "_2_31", "_2_28", "_2_27", "_2_24", "_2_17", "2014")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=ROOT / ".wheels")
    parser.add_argument("--python", default="3.12", help="version of the other machine's Python")
    given = parser.parse_args()
    platforms = [f"--platform=manylinux{version}_x86_64" for version in PLATFORMS]
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--implementation", "cp"]
    command += ["--python-version", given.python, *platforms, "-c", str(ROOT / "constraints.txt")]
    if commit() is None:
        raise SystemExit(f"{ROOT} is not a git checkout: the results could not say what they were measured with")
    with tempfile.TemporaryDirectory() as made:
        subprocess.run([*command, "-d", made, *PACKAGES], check=True)
        replace(given.out, Path(made))
    (given.out / COMMIT).write_text(f"{commit()}+{sources()}\n")
    size = sum(path.stat().st_size for path in given.out.glob("*.whl"))
    print(f"{given.out}: {len(list(given.out.glob('*.whl')))} wheels, {size / 2**20:.0f} MiB")


def replace(out: Path, made: Path) -> None:
    """Moves the wheels in `made` into the folder and removes all wheels that were there; other files in it stay."""
    out.mkdir(parents=True, exist_ok=True)
    for old in (*out.glob("*.whl"), out / COMMIT):  # two versions of one package cannot both be installed
        old.unlink(missing_ok=True)
    shutil.copytree(made, out, dirs_exist_ok=True)


if __name__ == "__main__":
    main()
