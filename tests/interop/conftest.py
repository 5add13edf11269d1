"""The reference process: a Python with torch and transformers beside this one."""

import functools
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
OWN = ROOT / ".venv-torch" / "bin" / "python"  # made by `make test-hf`


def _has_torch(python: str) -> bool:
    code = "import importlib.util as u, sys; sys.exit(not (u.find_spec('torch') and u.find_spec('transformers')))"
    return subprocess.run([python, "-c", code], capture_output=True).returncode == 0


@functools.cache
def reference_python() -> str | None:
    """This interpreter if it has torch and transformers, else that of .venv-torch, else None."""
    found = [python for python in (sys.executable, str(OWN)) if Path(python).exists() and _has_torch(python)]
    return found[0] if found else None


class Reference:
    """transformers' own models and logits; see reference.py."""

    def __init__(self, python: str, folder: Path):
        self.folder = folder
        self.errors = (folder / "stderr.txt").open("w+")
        environment = os.environ | {"HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": str(folder / "modules")}
        environment["PYTHONPATH"] = str(ROOT)
        self.process = subprocess.Popen(
            [python, "-m", "tests.interop.reference", str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
        )
        self._expect("ready")

    def _expect(self, word: str) -> None:
        line = self.process.stdout.readline().strip()
        if line != word:
            self.errors.seek(0)
            raise RuntimeError(f"the reference says {line!r}: {self.errors.read()[-2000:]}")

    def tokens(self, case: str) -> np.ndarray:
        return np.load(self.folder / case / "logits.npz")["tokens"]

    def logits(self, case: str) -> np.ndarray:
        return np.load(self.folder / case / "logits.npz")["logits"]

    def load(self, model: Path, tokens: np.ndarray, dtype: str = "float32", **others: np.ndarray) -> np.ndarray:
        """Logits of a folder, as transformers loads and computes it in a dtype ("auto": the checkpoint's, which is its
        default). others: further arguments of the model."""
        return self.answers(model, tokens, dtype, **others)["logits"]

    def answers(self, model: Path, tokens: np.ndarray | None, dtype: str = "float32", **others: np.ndarray) -> dict:
        """`load`'s logits; beside them `loss`, where labels are given, and `wide`, names of its float32 parameters;
        and `tuple`, of how many parts, where the model returned one. tokens: None leaves them out."""
        asked, out = self.folder / "tokens.npz", self.folder / "out.npz"
        np.savez(asked, **({} if tokens is None else {"input_ids": tokens}), **others)
        self.process.stdin.write(f"{model}\t{asked}\t{out}\t{dtype}\n")
        self.process.stdin.flush()
        self._expect("done")
        return dict(np.load(out))

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait(timeout=30)
        self.errors.close()


@pytest.fixture(scope="session")
def reference(tmp_path_factory):
    python = reference_python()
    if python is None:
        pytest.skip("needs torch and transformers, here or in .venv-torch: make test-hf")
    process = Reference(python, tmp_path_factory.mktemp("reference"))
    yield process
    process.close()
