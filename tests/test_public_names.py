"""`import nagjax` offers every name, and imports what is behind it only on first use."""

import resource
import subprocess
import sys
from pathlib import Path

import pytest

import nagjax
from nagjax.residual.module import Residual
from nagjax.residual.registry import own_schemes
from nagjax.stubs import stubs

CHECK = "import sys, nagjax; sys.exit(any(name in sys.modules for name in ('jax', 'flax', 'numpy', 'optax')))"


def test_import_alone_is_quick_and_brings_no_jax():
    """Under 0.3 s of CPU time beyond Python's own start, as the best of a few tries."""

    def seconds(code: str) -> float:
        found = []
        for _ in range(3):
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            assert subprocess.run([sys.executable, "-c", code], cwd=Path(nagjax.__file__).parents[1]).returncode == 0
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            found.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        return min(found)

    assert seconds(CHECK) - seconds("pass") < 0.3


def test_names():
    for name in ("NAG", "Review", "LNS", "Plain", "ReZero"):
        assert issubclass(getattr(nagjax, name), Residual)
    own = own_schemes()
    missing = {scheme.__name__ for scheme in own.values()} - set(dir(nagjax))
    assert len(own) > 20 and not missing, f"run: python -m nagjax.stubs, which adds {missing}"
    for name in ("Transformer", "ModelConfig", "fit", "load", "optimizer", "start_factors", "MixtureOfDepths", "linen"):
        assert name in dir(nagjax) and getattr(nagjax, name).__doc__
    with pytest.raises(AttributeError, match="nagjax has no 'nothing'"):
        nagjax.nothing  # noqa: B018


def test_the_stubs_are_what_would_be_written():
    for path, text in stubs().items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name} is stale; run: python -m nagjax.stubs"
    assert (Path(nagjax.__file__).parent / "py.typed").exists()


def test_the_stub_has_every_name():
    text = (Path(nagjax.__file__).parent / "__init__.pyi").read_text(encoding="utf-8")
    for name in dir(nagjax):
        if not name.startswith("_") and not isinstance(getattr(nagjax, name), type(sys)):
            assert f"as {name}\n" in text or f"class {name}(" in text, name


def test_packages_are_there_without_an_import_of_their_own():
    code = """
import nagjax
assert nagjax.data.verify and nagjax.errors.UserError and nagjax.measure and "measure" in dir(nagjax)
assert not hasattr(nagjax, "nothing")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=Path(nagjax.__file__).parents[1], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()
