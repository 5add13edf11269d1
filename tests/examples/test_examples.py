"""The examples run, learn, and are short."""

import importlib.util
import warnings
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "examples"


@pytest.mark.parametrize(
    "name, steps, least", [("own_nnx_model", 60, 0.9), ("own_linen_model", 80, 0.85), ("own_optimizer", 60, 0.8)]
)
def test_it_learns(name, steps, least):
    path = FOLDER / f"{name}.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 80
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", module="examples|own_")
        assert module.main(steps) > least


def test_all_are_tried():
    assert {path.stem for path in FOLDER.glob("*.py")} == {"own_nnx_model", "own_linen_model", "own_optimizer"}
