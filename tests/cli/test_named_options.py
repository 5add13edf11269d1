"""Options that pages and errors name are there, and so are the errors that docs/troubleshooting.md explains."""

import re
from pathlib import Path

from nagjax.cli import functions, verbs
from nagjax.commands.completion import every_option
from nagjax.declared import SCHEMES, scheme_fields

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = [path for path in sorted((ROOT / "nagjax").rglob("*.py")) if path.name != "page.py"]  # which has CSS
OURS = {"--help", "--help-all", "--version", "--scheme.OPTION", "--scheme.no-OPTION"}
OTHERS = {  # of gcloud, hf, XLA, and of this repository's programs that are not its command line
    *("--location", "--uniform-bucket-level-access", "--enable-hierarchical-namespace", "--repo-type", "--revision"),
    *("--xla_cpu_max_isa", "--xla_cpu_experimental_ynn_fusion_type", "--part", "--repeats", "--size", "--results"),
    *("--docs", "--op", "--step", "--command", "--project", "--worker", "--zone"),
}


def known() -> set[str]:
    commands = [function for verb in verbs() for function in functions(verb).values()]
    found = {flag for function in commands for option in every_option(function) for flag in option.flags}
    schemes = [path.stem for path in SCHEMES.glob("*.py") if path.stem != "__init__"]
    return found | {f"--scheme.{own.name}".replace("_", "-") for scheme in schemes for own in scheme_fields(scheme)}


def named(path: Path) -> set[str]:
    words = re.findall(r"(?<![\w-])--[a-z][\w.-]*", path.read_text(encoding="utf-8"))
    return {word.rstrip(".") for word in words}


def test_every_option_that_is_named_is_there():
    options = known() | OURS
    groups = {f"{option.rsplit('.', 1)[0]}." for option in options if "." in option}
    assert len(options) > 150 and not OTHERS & options
    missing = {
        f"{path.relative_to(ROOT)}: {word}"
        for path in PAGES + SOURCES
        for word in named(path) - options - OTHERS
        if f"{word}." not in groups  # --mod.*, a group
    }
    assert not missing
    assert OTHERS <= {word for path in PAGES + SOURCES for word in named(path)}


def test_the_errors_that_are_explained_are_raised():
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    explained = re.findall(r"^\| `([^`]+)` \|", page, re.M)
    code = "".join(path.read_text(encoding="utf-8") for path in SOURCES)
    assert len(explained) > 5 and not [error for error in explained if error not in code]
