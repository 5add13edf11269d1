"""Layers of packages: no file imports from a higher one, no two import each other, and no file does two things."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted(p for package in ("pallas_kernels", "nagjax", "experiments") for p in (ROOT / package).rglob("*.py"))

# The layers from the lowest up: each may import itself, what its line names, and all that those may. A
# module belongs to the part with the longest name that its own begins with.
LINES = {
    "pallas_kernels": [],
    "nagjax": ["nagjax.interop", "nagjax.notebook"],  # its public names: lazily, and nobody below imports it
    "nagjax.errors": [],
    "nagjax.discovery": ["nagjax.errors"],
    "nagjax.parameters": ["nagjax.errors"],
    "nagjax.memory": [],
    "nagjax.json_reader": ["nagjax.ranges"],
    "nagjax.files": ["nagjax.json_reader"],
    "nagjax.console": [],
    "nagjax.ranges": ["nagjax.errors"],
    "nagjax.declared": ["nagjax.ranges", "nagjax.discovery"],
    "nagjax.arguments": ["nagjax.declared"],
    "nagjax.data": ["nagjax.files", "nagjax.ranges"],
    "nagjax.layers": ["nagjax.ranges", "nagjax.parameters", "pallas_kernels"],
    "nagjax.residual": ["nagjax.layers", "nagjax.discovery", "nagjax.ranges", "nagjax.parameters", "pallas_kernels"],
    "nagjax.mod": ["nagjax.residual", "nagjax.layers"],
    "nagjax.model": ["nagjax.mod"],
    "nagjax.runs.names": [],
    "nagjax.runs.config": ["nagjax.model", "nagjax.data"],
    "nagjax.options": ["nagjax.runs.config", "nagjax.arguments"],
    "nagjax.train.distributed": ["nagjax.runs.config", "nagjax.processes"],
    "nagjax.train.checkpoint": ["nagjax.train.distributed", "nagjax.runs.names", "nagjax.files", "nagjax.console"],
    "nagjax.runs": ["nagjax.train.checkpoint"],
    "nagjax.train": ["nagjax.runs", "nagjax.console"],
    "nagjax.measure": ["nagjax.generate", "nagjax.memory"],
    "nagjax.generate": ["nagjax.train"],
    "nagjax.interop": ["nagjax.generate"],
    "nagjax.plan": ["nagjax.train", "nagjax.options"],
    "nagjax.report": ["nagjax.generate", "nagjax.measure"],
    "nagjax.notebook": ["nagjax.report", "nagjax.options"],
    "nagjax.config_file": ["nagjax.options"],
    "nagjax.processes": ["nagjax.json_reader"],
    "nagjax.demo": ["nagjax.generate", "nagjax.memory", "nagjax.options", "nagjax.processes"],
    "nagjax.sweep": ["nagjax.config_file", "nagjax.memory", "nagjax.processes", "nagjax.report"],
    "nagjax.stubs": ["nagjax", "nagjax.residual"],
    "nagjax.cli": ["nagjax", "nagjax.config_file"],  # commands are imported when they are called
    "nagjax.__main__": ["nagjax.cli"],
    "nagjax.commands": [
        "nagjax.cli",
        "nagjax.memory",
        "nagjax.console",
        "nagjax.report",
        "nagjax.interop",
        "nagjax.plan",
        "nagjax.sweep",
        "nagjax.demo",
        "nagjax.processes",
    ],
    "experiments": ["nagjax.commands", "nagjax.notebook"],
}
FOREIGN = {"pallas_kernels": {"flax", "optax", "orbax", "grain"}, "nagjax.data": {"jax", "flax"}}


@functools.cache
def below(part: str) -> frozenset[str]:
    return frozenset({part}.union(*(below(other) for other in LINES[part])))


def part_of(module: str) -> str | None:
    """The layer that a module belongs to; None for other libraries."""
    names = module.split(".")
    prefixes = [".".join(names[:n]) for n in range(len(names), 0, -1)]
    return next((prefix for prefix in prefixes if prefix in LINES), None)


def module_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


MODULES = {module_of(path): path for path in FILES}


@functools.cache
def imports(path: Path) -> frozenset[str]:
    """Modules a file imports when it runs, at its top or later on."""
    found = set()
    tree = ast.parse(path.read_text(), str(path))
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    never = {inner for block in blocks for inner in ast.walk(block)}
    for node in ast.walk(tree):
        if node in never:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            inner = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name if name in MODULES else node.module for name in inner}  # from nagjax import data
    return frozenset(found)


@pytest.mark.parametrize("part", LINES)
def test_imports_point_one_way(part):
    files = [path for module, path in MODULES.items() if part_of(module) == part]
    assert files
    for path in files:
        used = {part_of(name) for name in imports(path)} - {None}
        assert used <= below(part), f"{path.relative_to(ROOT)} imports {sorted(used - below(part))}"
        foreign = {name.split(".")[0] for name in imports(path)} & FOREIGN.get(part, set())
        assert not foreign, f"{path.relative_to(ROOT)} imports {sorted(foreign)}"


def test_every_package_has_its_line():
    packages = {
        module_of(path)
        for folder in (ROOT / "nagjax").iterdir()
        if folder.is_dir() and (path := folder / "__init__.py").exists()
    }
    single = {module_of(path) for path in (ROOT / "nagjax").glob("*.py")}
    assert packages | single | {"pallas_kernels", "experiments"} <= LINES.keys() | {"nagjax.linen", "nagjax.__main__"}


def test_no_two_modules_import_each_other():
    """Neither through other modules nor inside a function."""
    graph = {module: imports(path) & MODULES.keys() - {module} for module, path in MODULES.items()}
    done: set[str] = set()

    def visit(module: str, way: tuple[str, ...]) -> None:
        assert module not in way, " -> ".join((*way[way.index(module) :], module))
        if module not in done:
            for other in sorted(graph[module]):
                visit(other, (*way, module))
            done.add(module)

    for module in graph:
        visit(module, ())


def test_no_package_gives_one_of_its_modules_names_to_something_else():
    """`import package.module as m` would take that."""
    for init in (path for path in FILES if path.name == "__init__.py"):
        own = {path.stem for path in init.parent.iterdir() if path.suffix == ".py" or path.is_dir()}
        body = ast.parse(init.read_text()).body
        taken = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for node in (node for node in body if isinstance(node, ast.ImportFrom) and node.module != module_of(init)):
            taken |= {alias.asname or alias.name for alias in node.names}
        assert not own & taken, f"{init.relative_to(ROOT)} takes {sorted(own & taken)}"


def test_the_names_of_a_run_folder_stand_in_one_place():
    """Elsewhere they are of other folders: a model's of transformers, a corpus'."""
    import nagjax.runs.names as names

    spelled = {name for name in vars(names).values() if isinstance(name, str) and "." in name.strip(".")}
    spelled |= {names.CHECKPOINTS, names.WANDB_ID, names.SAVING, names.DELETING, names.DAMAGED, *names.TOKENIZER_FILES}
    others = {
        "nagjax.runs.names": spelled,
        "nagjax.data.store": {"manifest.json", "tokenizer.json"},
        "nagjax.data.chat_template": {"chat_template.jinja", "tokenizer_config.json"},
        "nagjax.interop.source": {"config.json"},
    }
    assert len(spelled) > 30
    for module, path in MODULES.items():
        if module.split(".")[0] == "nagjax" or module.startswith("experiments"):
            strings = {
                part
                for node in ast.walk(ast.parse(path.read_text()))
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
                for part in (node.value, node.value.rpartition("/")[2])
            }
            found = strings & spelled - others.get(module, set())
            assert not found, f"{path.relative_to(ROOT)} spells {sorted(found)}"


def test_no_file_is_over_400_lines():
    tests = sorted((ROOT / "tests").rglob("*.py"))
    files = [path for path in FILES if "experiments" not in path.parts] + tests
    long = {str(p.relative_to(ROOT)): n for p in files if (n := len(p.read_text().splitlines())) > 400}
    assert not long
