"""The documentation's page of schemes, which reads source text, against the classes themselves."""

import ast
import dataclasses
import importlib.util
import inspect
import re
from pathlib import Path

import pytest
from flax import nnx

from nagjax.residual.protocol import Nothing, SublayerIndex
from nagjax.residual.registry import own_schemes

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "nagjax" / "residual"
OWN = dict(sorted(own_schemes().items()))


def load():
    spec = importlib.util.spec_from_file_location("scheme_page", ROOT / "docs" / "scheme_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sections() -> dict[str, str]:
    """The page's section for each scheme, and under "" the text before them."""
    parts = re.split(r"^## (\w+)$", load().page(FOLDER), flags=re.MULTILINE)
    return dict(zip(["", *parts[1::2]], parts[::2], strict=True))


def test_the_page_in_the_repository_is_of_these_schemes():
    page = load()
    kept, written = page.PAGE.read_text(encoding="utf-8"), page.page(FOLDER)
    assert kept == written, "run: python docs/scheme_page.py"


def test_every_scheme_has_a_row_with_equation_and_source(sections):
    assert list(sections) == ["", *OWN] and len(OWN) > 20
    rows = re.findall(r"^\| \[`(\w+)`\]\(#\w+\) \| (.+?) \| (.*) \| (.*) \|$", sections[""], flags=re.MULTILINE)
    assert [name for name, *_ in rows] == list(OWN)
    for name, title, equation, source in rows:
        assert title == OWN[name].title
        assert equation.startswith("`") and equation.endswith("`"), f"{name}: its docstring shows no equation"
        assert re.search(r"arxiv.org/abs/\d{4}\.\d{5}|(?:19|20)\d\d", source), f"{name}: its docstring names no source"


@pytest.mark.parametrize("name", OWN)
def test_a_section_has_the_options_and_the_modules_a_scheme_adds(sections, name):
    section, scheme, rngs = sections[name], OWN[name](), nnx.Rngs(0)
    options = re.findall(r"^\| `(\w+)` \| `(.+?)` \| .*\|$", section, flags=re.MULTILINE)
    defaults = {field.name: field.default for field in dataclasses.fields(scheme)}
    assert {field: ast.literal_eval(value) for field, value in options} == defaults
    made = (scheme.entry(8, rngs), scheme.gate(8, SublayerIndex(1, 4), rngs), scheme.ends(8, 1.0, rngs))
    listed = dict.fromkeys(re.findall(r"^- by .*?, `(\w+)`", section, flags=re.MULTILINE))
    added = {type(module).__name__ for module in made if not isinstance(module, Nothing)}
    assert added <= set(listed) and bool(added) == bool(listed)
    assert float(re.search(r"default learning rate `(.*?)`", section)[1]) == scheme.learning_rate
    assert inspect.cleandoc(type(scheme).__doc__) in section
