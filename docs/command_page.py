"""Writes docs/commands.md, the page of all commands and options, from what `nagjax COMMAND --help-all` is made of:
`python docs/command_page.py`."""

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from nagjax.arguments import Option, description, parameters
from nagjax.cli import functions, verbs
from nagjax.options import RunOptions, own_options, run_options

PAGE = Path(__file__).with_name("commands.md")
HEAD = """<!-- Written by docs/command_page.py: edit the docstrings and the fields' comments, and run it. -->

# Commands and options

Every command with its own options, then the [options of a run](#options-of-a-run). `nagjax COMMAND --help` prints the
same in a terminal, `--help-all` all of it for the commands that take a run's options.
"""
SHARED = """## Options of a run

For the commands above that say so, and in a file for them (`nagjax config` prints one), where dashes are underscores.
Each scheme has options of its own beside these, `--scheme.*`: see [Residual schemes](schemes.md). In Python,
`nagjax.fit` takes them as keywords, those with a dot in a dictionary: `fit(**{"mod.rate": 0.5})`.
"""


def page() -> str:
    parts = [HEAD]
    for verb in verbs():
        for words, function in functions(verb).items():
            parts.append("\n".join(_command(words, function)))
    parts.append(SHARED)
    groups: dict[str, list[Option]] = {}
    for option in run_options():
        if not option.name.startswith("scheme."):
            groups.setdefault(option.group, []).append(option)
    parts += [f"### {group}\n\n{_table(options)}\n" for group, options in groups.items()]
    return "\n".join(parts)


def _command(words: str, function: Callable) -> Iterator[str]:
    fields = parameters(function)
    options = [option for group in own_options(fields).values() for option in group]
    positional = [option.signature for option in options if option.positional]
    yield f"## nagjax {words}\n\n`{' '.join(['nagjax', words, *positional, '[OPTIONS]'])}`\n"
    yield f"{description(function)}\n"
    if any(field.hint is RunOptions for field in fields):
        yield "Takes the [options of a run](#options-of-a-run), too.\n"
    if options:
        yield f"{_table(options)}\n"


def _table(options: Iterable[Option]) -> str:
    rows = [f"| `{_cell(option.signature)}` | {_cell(_shielded(option.told))} |" for option in options]
    return "\n".join(["| option | |", "|---|---|", *rows])


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _shielded(text: str) -> str:
    """What Markdown would read as its own."""
    for letter in "*_<[":
        text = text.replace(letter, f"\\{letter}")
    return text


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
