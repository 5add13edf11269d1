"""Reads from source files what classes declare: the texts of fields, and the options of schemes without importing them.

A field's text is the comment behind it, or the comment lines directly above it. The argument parser, its help and shell
completion need no more than this; importing a scheme would import jax.
"""

import ast
import dataclasses
import importlib
import inspect
import io
import operator
import sys
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

import nagjax.ranges
from nagjax.discovery import SCHEME_GROUP, installed, pick

ROOT = Path(__file__).parents[1]
SCHEMES = Path(__file__).parent / "residual" / "schemes"
REQUIRED = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class Field:
    """A field as it is written in the source; `default` is REQUIRED if it has none."""

    name: str
    hint: Any
    default: Any
    text: str


def fields_of(cls: type) -> list[Field]:
    """The fields of a dataclass."""
    texts: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        if dataclasses.is_dataclass(base):
            texts |= _texts_of(base)
    hints = nagjax.ranges.field_hints(cls)
    return [Field(f.name, hints[f.name], _default(f), texts.get(f.name, "")) for f in dataclasses.fields(cls)]


def _texts_of(cls: type) -> dict[str, str]:
    """The texts of a class's own fields; empty if the class has no source file, as in a notebook's cell."""
    try:
        return _texts(Path(inspect.getfile(cls))).get(cls.__name__, {})
    except (OSError, TypeError):
        return {}


def _default(field: dataclasses.Field) -> Any:
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()


def scheme_names() -> list[str]:
    """The names of all schemes: the package's own, one for each file, those of installed packages, and registered
    ones."""
    own = (path.stem for path in SCHEMES.glob("*.py") if path.stem != "__init__")
    loaded = sys.modules.get("nagjax.residual.registry")
    return sorted({*own, *(loaded.schemes() if loaded else installed(SCHEME_GROUP))})


def scheme_fields(name: str) -> list[Field]:
    """The options of a scheme. For the package's own schemes they are read from the source, for others from the class.

    Raises UserError for an unknown scheme.
    """
    path = SCHEMES / f"{name}.py"
    if not (name.isidentifier() and name != "__init__" and path.exists()):
        if name not in scheme_names() and installed(SCHEME_GROUP):
            importlib.import_module("nagjax.residual.registry").schemes()  # warns of schemes it cannot load
        pick("scheme", name, dict.fromkeys(scheme_names()), "schemes")
        return fields_of(importlib.import_module("nagjax.residual.registry").find_scheme(name))
    found: dict[str, Field] = {}
    for file, node in reversed([*_line(path, name)]):
        found |= {field.name: field for field in _declared(file, node)}
    return list(found.values())


def _line(path: Path, scheme: str) -> Iterator[tuple[Path, ast.ClassDef]]:
    """The scheme's class and its base classes, nearest first, each with its file."""
    tree = _tree(path)
    named = lambda node: any(ast.unparse(p) == f"name: ClassVar[str] = '{scheme}'" for p in node.body)  # noqa: E731
    node = next(node for node in tree.body if isinstance(node, ast.ClassDef) and named(node))
    while True:
        yield path, node
        base = ast.unparse(node.bases[0]) if node.bases else ""
        if not base.isidentifier():  # no further base: none at all, or abc.ABC
            return
        module = next(
            (n.module for n in _tree(path).body if isinstance(n, ast.ImportFrom) and base in {a.name for a in n.names}),
            None,
        )
        path = ROOT.joinpath(*module.split(".")).with_suffix(".py") if module else path
        node = next((n for n in _tree(path).body if isinstance(n, ast.ClassDef) and n.name == base), None)
        if node is None:  # abc.ABC
            return


def _declared(path: Path, node: ast.ClassDef) -> Iterator[Field]:
    for part in node.body:
        if isinstance(part, ast.AnnAssign) and not ast.unparse(part.annotation).startswith("ClassVar"):
            default = REQUIRED if part.value is None else _value(part.value)
            name = ast.unparse(part.target)
            yield Field(name, _value(part.annotation), default, _texts(path)[node.name].get(name, ""))


KNOWN = vars(nagjax.ranges) | {"Literal": Literal, "Annotated": Annotated}
KNOWN |= {kind.__name__: kind for kind in (bool, float, int, str, tuple)}
OPERATORS = {
    ast.Add: operator.add,
    ast.BitOr: operator.or_,
    ast.Div: operator.truediv,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
    ast.Sub: operator.sub,
}


def _value(node: ast.expr) -> Any:
    """The value of an annotation or a default, which may consist of constants, types, ranges and arithmetic on them.
    Raises TypeError for anything else."""
    match node:
        case ast.Constant():
            return node.value
        case ast.Name():
            return KNOWN[node.id]
        case ast.Tuple():
            return tuple(map(_value, node.elts))
        case ast.Subscript():
            return _value(node.value)[_value(node.slice)]
        case ast.UnaryOp(op=ast.USub()):
            return -_value(node.operand)
        case ast.BinOp():
            return OPERATORS[type(node.op)](_value(node.left), _value(node.right))
        case ast.Call(func=ast.Name(id="Range")):
            return nagjax.ranges.Range(**{keyword.arg: _value(keyword.value) for keyword in node.keywords})
    raise TypeError(f"write the annotation or default with constants, types and ranges, not {ast.unparse(node)}")


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


@cache
def _texts(path: Path) -> dict[str, dict[str, str]]:
    """The texts of all fields in a file, by class and field."""
    source = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    comments = {token.start[0]: token for token in tokens if token.type == tokenize.COMMENT}
    found: dict[str, dict[str, str]] = {}
    for node in ast.walk(_tree(path)):
        if isinstance(node, ast.ClassDef):
            fields = (part for part in node.body if isinstance(part, ast.AnnAssign))
            found[node.name] = {ast.unparse(part.target): _text(comments, part) for part in fields}
    return found


def _text(comments: dict[int, tokenize.TokenInfo], field: ast.AnnAssign) -> str:
    lines = [field.end_lineno] if field.end_lineno in comments else []
    above = field.lineno - 1
    while field.end_lineno not in comments and above in comments and comments[above].line.lstrip().startswith("#"):
        lines, above = [above, *lines], above - 1
    return " ".join(comments[line].string.lstrip("# ").strip() for line in lines)
