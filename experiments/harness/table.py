"""The table of experiments/README.md, made from the recipes' docstrings and the result files and nothing else.

`python -m experiments.harness.table` writes it.
"""

from pathlib import Path

from experiments.harness.recipe import HOME, Recipe, load, names
from experiments.harness.results import plot_file, read_result, result_file
from nagjax.files import write_text

COLUMNS = ("claim", "source", "expected", "measured", "verdict", "command", "result file")
BEGIN, END = "<!-- table: python -m experiments.harness.table -->", "<!-- end of table -->"
NOT_MEASURED = "not measured"


def table(home: Path = HOME) -> str:
    """Markdown: a row per recipe, with the result files that lie in `home`/results."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    return "\n".join(lines + [f"| {' | '.join(_cells(load(name), home))} |" for name in names()])


def _cells(recipe: Recipe, home: Path) -> list[str]:
    sizes = [size for size in recipe.sizes if size != "smoke" and result_file(home, recipe.name, size).exists()]
    results = {size: read_result(result_file(home, recipe.name, size)) for size in sizes}
    claim, source, expected = (_escape(recipe.header[field]) for field in ("claim", "source", "expected"))
    if not results:
        return [claim, source, expected, NOT_MEASURED, NOT_MEASURED, f"`{recipe.header['command']}`", ""]

    def by_size(cell) -> str:
        return "<br>".join(f"{size}: {cell(size, result)}" for size, result in results.items())

    return [
        claim,
        source,
        expected,
        by_size(lambda _, result: _escape(result["summary"]["measured"])),
        by_size(lambda _, result: result["summary"]["verdict"]),
        by_size(lambda _, result: f"`{_escape(result['command'])}`"),
        by_size(lambda size, _: _links(home, recipe.name, size)),
    ]


def _links(home: Path, name: str, size: str) -> str:
    result, plot = (path(home, name, size).relative_to(home).as_posix() for path in (result_file, plot_file))
    return f"[numbers]({result}), [plot]({plot})"


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def readme(text: str, home: Path = HOME) -> str:
    """A README with its table renewed."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    return f"{before}{BEGIN}\n\n{table(home)}\n\n{END}{after}"


def write_table() -> None:
    """Renews the table in experiments/README.md."""
    path = HOME / "README.md"
    write_text(path, readme(path.read_text(encoding="utf-8")))


if __name__ == "__main__":
    write_table()
