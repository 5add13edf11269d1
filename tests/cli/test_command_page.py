"""The documentation's page of commands, which is committed, against the commands themselves."""

import runpy
from pathlib import Path

from nagjax.cli import verbs
from nagjax.options import run_options

DOCS = Path(__file__).parents[2] / "docs"


def test_the_page_is_what_its_program_writes():
    program = runpy.run_path(str(DOCS / "command_page.py"))
    assert program["page"]() == program["PAGE"].read_text(encoding="utf-8"), "run: python docs/command_page.py"


def test_every_command_and_every_option_of_a_run_is_on_the_page():
    text = (DOCS / "commands.md").read_text(encoding="utf-8")
    assert [verb for verb in verbs() if f"\n## nagjax {verb}" not in text] == []
    shared = text.partition("\n## Options of a run\n")[2]
    lost = [o.name for o in run_options() if not o.name.startswith("scheme.") and f"| `{o.flags[0]}" not in shared]
    assert lost == []
