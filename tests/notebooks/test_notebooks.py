"""The committed notebooks: executed, complete, small, and without paths of the machine they ran on.

`make notebooks` executes them.
"""

import base64
import json
import re
from pathlib import Path

import pytest

from nagjax.declared import SCHEMES

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LOCAL = re.compile(r"/(?:home|root|tmp|Users|work|content|opt|usr)/")


def cells(path: Path, kind: str) -> list[dict]:
    return [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == kind]


@pytest.fixture(params=NOTEBOOKS, ids=lambda path: path.stem)
def notebook(request) -> Path:
    return request.param


def test_there_are_five():
    assert [path.name[0] for path in NOTEBOOKS] == list("12345")


def test_every_cell_has_run_in_order_without_an_error(notebook):
    code = cells(notebook, "code")
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    assert {output["output_type"] for output in outputs} <= {"stream", "display_data", "execute_result"}
    assert not [output for output in outputs if output.get("name") == "stderr"]


def test_the_first_code_cell_installs(notebook):
    install = "".join(cells(notebook, "code")[0]["source"])
    assert 'find_spec("nagjax"), "origin", None) is None' in install and "%pip install" in install
    assert install == "".join(cells(NOTEBOOKS[0], "code")[0]["source"])


def test_figures_are_drawn_and_the_file_is_small(notebook):
    data = [output.get("data", {}) for cell in cells(notebook, "code") for output in cell["outputs"]]
    figures = [base64.b64decode("".join(each["image/png"])) for each in data if "image/png" in each]
    assert len(figures) >= 2 and all(figure.startswith(b"\x89PNG") for figure in figures)
    assert notebook.stat().st_size < 300_000


def test_nothing_of_the_machine_is_in_it(notebook):
    code = cells(notebook, "code")
    text = ["".join(output.get("text", "")) for cell in code for output in cell["outputs"]]
    text += ["".join(output.get("data", {}).get("text/plain", "")) for cell in code for output in cell["outputs"]]
    text += ["".join(cell["source"]) for cell in code + cells(notebook, "markdown")]
    found = [line for part in text for line in part.splitlines() if LOCAL.search(line)]
    assert not found


def test_links_between_notebooks_lead_somewhere(notebook):
    links = re.findall(r"\]\(([^)]+\.ipynb)\)", "".join("".join(c["source"]) for c in cells(notebook, "markdown")))
    assert all((FOLDER / link).is_file() for link in links)


def test_a_list_of_all_schemes_is_of_all_schemes():
    said = NOTEBOOKS[0].read_text(encoding="utf-8")
    own = sorted(path.stem for path in SCHEMES.glob("*.py") if path.stem != "__init__")
    assert f"known schemes: {', '.join(own)}\\n" in said
