"""No number without its result file: the README's table is generated, and each summary follows from its runs."""

import dataclasses
import json

import pytest

from experiments.harness.recipe import HOME, load
from experiments.harness.results import read_result
from experiments.harness.sweep import settings_from
from experiments.harness.table import NOT_MEASURED, readme, table

RESULTS = sorted((HOME / "results").glob("*.json"))


def test_the_readme_table_is_what_the_program_generates():
    text = (HOME / "README.md").read_text(encoding="utf-8")
    assert readme(text) == text, "run python -m experiments.harness.table"


@pytest.mark.parametrize("path", RESULTS, ids=[path.stem for path in RESULTS])
def test_the_summary_of_a_result_file_follows_from_its_runs(path):
    result = read_result(path)
    assert path.name == f"{result['recipe']}.{result['size']}.json"
    assert {"device", "versions", "commit", "date"} <= result["records"][0].origin.keys()
    recipe = load(result["recipe"])
    again = recipe.summarise(settings_from(recipe, result["settings"]), result["records"])
    assert json.loads(json.dumps(dataclasses.asdict(again))) == result["summary"]


def test_without_result_files_nothing_is_measured(tmp_path):
    rows = table(tmp_path).splitlines()[2:]
    assert rows and all(row.count(NOT_MEASURED) == 2 for row in rows)
