"""Finds recipes, and checks what a recipe file must contain."""

import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from experiments.harness.evidence import concluded
from experiments.harness.jobs import Job, Record
from experiments.harness.ngram import floors
from experiments.harness.results import Summary
from experiments.harness.settings import check_settings
from nagjax.discovery import pick
from nagjax.errors import UserError

HOME = Path(__file__).parents[1]
FIELDS = ("claim", "source", "expected", "hardware", "time", "command")
KNOWN = "known"  # an optional field: sizes, and which of their runs were known when the claim was made
REQUIRED_SIZES = ("smoke", "cpu")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A loaded recipe file."""

    name: str
    header: dict[str, str]  # the docstring's fields
    sizes: dict[str, Any]  # settings by size
    plan: Callable[[Any], Sequence[Job]]
    summarise: Callable[[Any, Sequence[Record]], Summary]
    draw: Callable[[Any, Sequence[Record]], Figure]

    def known(self, size: str) -> str:
        """What was known of this size's runs when the claim was made; "" if nothing was."""
        sizes, _, told = self.header.get(KNOWN, "").partition(": ")
        return told if size in sizes.split(", ") else ""

    def settings(self, size: str) -> Any:
        """The settings of a size. Raises UserError for a size that the recipe does not have."""
        if size not in self.sizes:
            raise UserError("size", size, f"{self.name} has {', '.join(self.sizes)}")
        return self.sizes[size]


def names() -> list[str]:
    """The names of all recipes, from their files."""
    return sorted(path.stem for path in HOME.glob("*.py") if not path.stem.startswith("__"))


def load(name: str) -> Recipe:
    """The recipe of this name. Raises UserError for an unknown recipe, and for a file that is not one."""
    pick("recipe", name, dict.fromkeys(names()), "recipes")
    module = importlib.import_module(f"experiments.{name}")
    own = getattr(module, "COMPARISON", module)
    parts = {"SIZES": module, "plan": own, "summarise": own, "draw": own}
    missing = [part for part, where in parts.items() if not hasattr(where, part)]
    header = read_header(module.__doc__ or "")
    missing += [field for field in FIELDS if not header.get(field)]
    missing += [size for size in REQUIRED_SIZES if size not in getattr(module, "SIZES", {})]
    if missing:
        fix = f"a recipe needs {', '.join(missing)}; a module that is not a recipe belongs in another folder"
        raise UserError("recipe", f"experiments/{name}.py", fix)
    return Recipe(name, header, module.SIZES, own.plan, own.summarise, own.draw)


def planned(recipe: Recipe, settings: Any) -> list[Job]:
    """The recipe's jobs, and the n-gram tables of all texts that they read. Raises UserError for settings that cannot
    be (`check_settings`), and if there are no jobs, because an empty result file would replace an earlier one."""
    check_settings(settings)
    jobs = list(recipe.plan(settings))
    if not jobs:
        values = {field.name: (getattr(settings, field.name), field.default) for field in dataclasses.fields(settings)}
        empty = {name: own for name, (own, usual) in values.items() if own in ((), 0) and own != usual}
        raise UserError(", ".join(empty), [*empty.values()], "leaves nothing to run; give at least one")
    return [*jobs, *floors(jobs)]


def judged(recipe: Recipe, settings: Any, records: Sequence[Record], tables: Sequence[Record]) -> Summary:
    """The recipe's summary with its evidence, and with the verdict that the evidence allows."""
    return concluded(recipe.summarise(settings, records), records, tables)


def read_header(docstring: str) -> dict[str, str]:
    """The fields `Name: text` of a docstring; a text ends at the next field or an empty line."""
    found = {}
    for block in re.split(r"\n\s*\n", inspect.cleandoc(docstring)):
        parts = re.split(rf"^({'|'.join((*FIELDS, KNOWN))}):", block, flags=re.MULTILINE | re.IGNORECASE)
        for field, text in zip(parts[1::2], parts[2::2], strict=True):
            found[field.lower()] = " ".join(text.split())
    return found
