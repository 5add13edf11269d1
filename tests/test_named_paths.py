"""Every path that the pages for contributors name exists."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = ("ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md")
TO_BE_WRITTEN = {"NAME", "VERB"}  # placeholders for the reader's own names


def tree(text: str) -> list[str]:
    """The paths of an indented drawing: `package/` lines with their members two blanks deeper."""
    found, above = [], []
    for line in (line for block in re.findall(r"```\n(.*?)```", text, re.S) for line in block.splitlines()):
        if match := re.match(r"( *)([\w.]+(?:/|\.py))(?= |$)", line):
            level = len(match[1]) // 2
            above = [*above[:level], match[2]]
            found.append("".join(above))
    return found


def named(text: str) -> set[str]:
    quoted = {
        name for name in re.findall(r"`([^`\n]+)`", text) if re.fullmatch(r"[\w.]+/[\w./]*|[\w./]+\.(py|txt)", name)
    }
    links = {link for link in re.findall(r"\]\(([^)#]+)\)", text) if "://" not in link}
    return {name for name in quoted | links | set(tree(text)) if not TO_BE_WRITTEN & set(re.split(r"[/.]", name))}


@pytest.mark.parametrize("page", PAGES)
def test_every_path_exists(page):
    paths = named((ROOT / page).read_text(encoding="utf-8"))
    assert not [path for path in sorted(paths) if not (ROOT / path).exists()]


def test_the_drawing_of_the_house_is_complete():
    drawn = set(tree((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")))
    packages = {f"{init.parent.relative_to(ROOT)}/" for init in (ROOT / "nagjax").glob("*/__init__.py")}
    assert len(packages) > 10 and packages <= drawn


def test_each_of_the_ten_changes_has_its_file():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    rows = [line for line in text[text.index("| change | file |") :].splitlines()[2:] if line.startswith("| ")]
    assert len(rows) == 10 and all("`" in row for row in rows)
    architecture = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    for row in rows:  # the map alone names the file, or the folder that holds one file per such thing
        path = re.findall(r"`([^`]+)`", row)[0]
        folder, member = path.rstrip("/").rsplit("/", 1)
        assert path in architecture or f"{member}/" in architecture or f"{folder.split('/')[-1]}/" in architecture, path
