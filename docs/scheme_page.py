"""Writes docs/schemes.md, the page of all residual schemes, from the text of nagjax/residual/.

`python docs/scheme_page.py` does it, and so does `make docs`. Imports neither nagjax nor jax.
"""

import ast
import dataclasses
import inspect
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "schemes.md"
HEAD = """<!-- Written by docs/scheme_page.py: edit the schemes' docstrings and run it. -->

# Residual schemes

One section for each file of `nagjax/residual/schemes/`, from its class: what its docstring says, the options that the
command line has for it (`--scheme NAME --scheme.OPTION VALUE`, with `-` for `_`; of one that is True or False
`--scheme.OPTION` or `--scheme.no-OPTION`), the parameters it adds to a model, and what it sets at the start. `h` is
the residual, `f_l` the branch of sublayer l = 1, 2, ... (an attention, then an MLP, in turn). How to add one:
[Write a scheme](write_a_scheme.md).

| scheme | | equation | source |
|---|---|---|---|
"""
ADDED = {"entry": "by reader (every sublayer, and the head)", "gate": "by sublayer", "ends": "by model"}
START = {
    "output_scale": "output projections times",
    "inner_scale": "values and up projections times",
    "embedding_std": "standard deviation of the embedding",
}
SPAN = r"`[^`]+`"
SPANS = re.compile(rf"{SPAN}(?:[;,] (?:and )?{SPAN})*")
AUTHOR = r"[A-Z][\w'-]+"
WORK = re.compile(rf"(?:{AUTHOR}, )*{AUTHOR}(?: Team| et al\.| & {AUTHOR})? (?:19|20)\d\d")
PREPRINT = re.compile(r"arXiv:(\d{4}\.\d{4,5})")


@dataclasses.dataclass(frozen=True)
class Class:
    """One class of the folder, by its syntax tree."""

    file: str
    source: str  # of the file
    node: ast.ClassDef

    @property
    def doc(self) -> str:
        return inspect.cleandoc(ast.get_docstring(self.node, clean=False) or "")

    def fields(self) -> Iterator[tuple[str, ast.AnnAssign]]:
        return ((n.target.id, n) for n in self.node.body if isinstance(n, ast.AnnAssign))

    def text(self, node: ast.AST | None) -> str:
        return ast.get_source_segment(self.source, node) or "" if node else ""


@dataclasses.dataclass(frozen=True)
class Known:
    """A scheme: its class, and behind it those it inherits from, nearest first."""

    line: tuple[Class, ...]

    @property
    def doc(self) -> str:
        return self.line[0].doc

    def constant(self, name: str) -> str:
        """Of a class attribute, its value as it is written."""
        values = (c.text(node.value) for c in self.line for field, node in c.fields() if field == name)
        return next(values, "").strip("\"'")

    def method(self, name: str) -> tuple[Class, ast.FunctionDef] | None:
        """The nearest one and where it is written, unless that is the protocol itself."""
        own = ((c, n) for c in self.line if c.file != "protocol" for n in c.node.body if isinstance(n, ast.FunctionDef))
        return next(((c, n) for c, n in own if n.name == name), None)

    @property
    def equation(self) -> str:
        """Code spans: what the docstring begins with, else what it shows as a block, else the first there are."""
        paragraphs = [" ".join(text.split()) for text in self.doc.split("\n\n")]
        block = [line.split(" #")[0].strip() for line in self.doc.split("\n") if line.startswith("    ")]
        begins, anywhere = SPANS.match(paragraphs[0]), SPANS.search(" ".join(paragraphs))
        if begins or not block:
            return (begins or anywhere or [""])[0]
        return "<br>".join(f"`{' '.join(line.split())}`" for line in block)

    @property
    def works(self) -> str:
        """Who and when, and where to read it."""
        text = " ".join(self.doc.split())
        links = [f"[{number}](https://arxiv.org/abs/{number})" for number in dict.fromkeys(PREPRINT.findall(text))]
        return ", ".join([*dict.fromkeys(WORK.findall(text)), *links])


def classes(folder: Path) -> list[Class]:
    found = []
    for path in sorted(folder.rglob("*.py")):
        source = path.read_text(encoding="utf-8")
        found += [Class(path.stem, source, node) for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    return found


def named(name: str, file: str, found: list[Class]) -> Class | None:
    """What the name means in the file: its own class of that name, else another's."""
    return next((c for c in sorted(found, key=lambda c: c.file != file) if c.node.name == name), None)


def schemes(found: list[Class]) -> dict[str, Known]:
    """By name, as `nagjax.schemes` finds them."""

    def line(own: Class) -> tuple[Class, ...]:
        bases = (named(ast.unparse(base).split(".")[-1], own.file, found) for base in own.node.bases)
        return (own, *(c for base in bases if base for c in line(base)))

    known = [Known(line(own)) for own in found]
    return {own.constant("name"): own for own in known if own.constant("name") == own.line[0].file}


def options(known: Known) -> list[str]:
    """Field, default and comment of the dataclass' fields, those of the bases first."""
    rows = {}
    for own in reversed(known.line):
        comments = _comments(own.source)
        for name, node in own.fields():
            if "ClassVar" in ast.unparse(node.annotation):
                rows.pop(name, None)
            else:
                rows[name] = f"| `{name}` | `{own.text(node.value)}` | {comments.get(node.lineno, '')} |"
    return list(rows.values())


def parameters(known: Known, found: list[Class]) -> list[str]:
    """What the scheme's `entry`, `gate` and `ends` make, by the names of the modules they call."""
    rows = {}
    for kind, where in ADDED.items():
        own, method = known.method(kind) or (None, ast.Pass())
        for call in (n for n in ast.walk(method) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)):
            module = named(call.func.id, own.file, found)
            if module and module.node.bases and module.node.name != "Nothing":
                said = " ".join(module.doc.split("\n\n")[0].split())
                rows.setdefault((module.node.name, said), {})[where] = None
    return [f"- {' and '.join(where)}, `{name}`{said and ': '}{said}" for (name, said), where in rows.items()]


def start(known: Known) -> list[str]:
    rows = []
    for name, what in START.items():
        if found := known.method(name):
            own, method = found
            last = [n.value for n in ast.walk(method) if isinstance(n, ast.Return)][-1]
            rows.append(f"- {what} `{re.sub(r'[a-z]+[.](?=[a-z])', '', own.text(last))}`{_said(method)}")
    if found := known.method("constrain"):
        rows.append(f"- parameters are brought back, then and after every step{_said(found[1])}")
    rate, gates, at_size = known.constant("learning_rate"), known.constant("gate_rate"), known.method("default_rate")
    rows.append(f"- default learning rate `{rate}` times 64 / width{_said(at_size[1]) if at_size else ''}")
    if gates != "1.0":
        rows.append(f"- parameters that commit an update learn at `{gates}` of it")
    return rows


def write() -> None:
    """Writes the page where it is not yet so."""
    text = page(ROOT / "nagjax" / "residual")
    if not PAGE.exists() or PAGE.read_text(encoding="utf-8") != text:
        PAGE.write_text(text, encoding="utf-8")


def page(folder: Path) -> str:
    """Markdown."""
    found, parts = classes(folder), [HEAD]
    listed = schemes(found)
    for name, known in listed.items():
        parts.append(f"| [`{name}`](#{name}) | {known.constant('title')} | {known.equation} | {known.works} |\n")
    for name, known in listed.items():
        parts.append(f"\n## {name}\n\n**{known.constant('title')}**, `--scheme {name}`\n\n{known.doc}\n")
        if rows := options(known):
            parts.append("\n| option | default | |\n|---|---|---|\n" + "\n".join(rows) + "\n")
        for what, rows in (("Parameters", parameters(known, found)), ("Start", start(known))):
            if rows:
                parts.append(f"\n{what}:\n\n" + "\n".join(rows) + "\n")
    return "".join(parts)


def _said(method: ast.FunctionDef) -> str:
    text = ast.get_docstring(method)
    return f": {' '.join(text.split())}" if text else ""


def _comments(source: str) -> dict[int, str]:
    """By line, the comment behind it, or those on the lines right above it."""
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(source).readline) if t.type == tokenize.COMMENT]
    alone = {t.start[0]: t.string.lstrip("# ") for t in tokens if t.line.strip()[0] == "#"}
    found = {}
    for number, text in alone.items():
        found[number + 1] = f"{found.pop(number, '')} {text}".strip()
    return found | {t.start[0]: t.string.lstrip("# ") for t in tokens if t.start[0] not in alone}


if __name__ == "__main__":
    write()
