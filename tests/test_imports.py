"""The house's one direction: no file imports from above, and no file holds two things."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(p for package in ("pallas_kernels", "nagjax") for p in (ROOT / package).rglob("*.py"))

# What each part of the house may import of the house, besides itself: its own line and all that its line names.
ERRORS = {"nagjax.errors"}
BASE = ERRORS | {"nagjax.discovery", "nagjax.parameters", "pallas_kernels"}
BELOW = {
    "pallas_kernels": set(),
    "nagjax.errors": set(),
    "nagjax.discovery": ERRORS,
    "nagjax.parameters": set(),
    "nagjax.data": ERRORS,
    "nagjax.layers": BASE,
    "nagjax.residual": BASE | {"nagjax.layers"},
}
BELOW["nagjax.mod"] = BELOW["nagjax.residual"] | {"nagjax.layers", "nagjax.residual"}
BELOW["nagjax.model"] = BELOW["nagjax.mod"] | {"nagjax.mod"}
BELOW["nagjax.runs"] = BELOW["nagjax.model"] | {"nagjax.model", "nagjax.data", "nagjax.train", "nagjax.interop"}
BELOW["nagjax.train"] = BELOW["nagjax.runs"] | {"nagjax.runs"}
BELOW["nagjax.measure"] = BELOW["nagjax.train"] | {"nagjax.train"}
MIDDLE = ("nagjax.generate", "nagjax.report", "nagjax.plan", "nagjax.interop")
BELOW |= {part: BELOW["nagjax.measure"] | {"nagjax.measure", *MIDDLE} for part in MIDDLE}
BELOW["nagjax.commands"] = BELOW["nagjax.plan"] | {*MIDDLE, "nagjax.notebook"}
FOREIGN = {"pallas_kernels": {"flax", "optax", "orbax", "grain"}, "nagjax.data": {"jax", "flax"}}


def part_of(module: str) -> str | None:
    """The part of the house a module belongs to; None for other people's."""
    names = module.split(".")
    if names[0] == "pallas_kernels":
        return "pallas_kernels"
    return ".".join(names[:2]) if names[0] == "nagjax" and len(names) > 1 else None


def imports(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(), str(path))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            submodule = node.module == "nagjax"  # from nagjax import data
            found |= {f"nagjax.{alias.name}" for alias in node.names} if submodule else {node.module}
    return found


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("part", BELOW)
def test_imports_point_one_way(part):
    for path in FILES:
        if part_of(module_of(path)) == part:
            used = {part_of(name) for name in imports(path)} - {None, part}
            assert used <= BELOW[part], f"{path.relative_to(ROOT)} imports {sorted(used - BELOW[part])}"
            foreign = {name.split(".")[0] for name in imports(path)} & FOREIGN.get(part, set())
            assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


def test_no_file_is_over_400_lines():
    tests = sorted((ROOT / "tests").rglob("*.py"))
    long = {str(p.relative_to(ROOT)): n for p in FILES + tests if (n := len(p.read_text().splitlines())) > 400}
    assert not long


def test_there_is_something_to_check():
    assert {"pallas_kernels", "nagjax.data", "nagjax.residual", "nagjax.train"} <= {
        part_of(module_of(p)) for p in FILES
    }
