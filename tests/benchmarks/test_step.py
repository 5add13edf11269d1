"""The tables of a CPU's step times."""

import json

from benchmarks import plan_tables as tables
from benchmarks import step


def test_the_tables_are_those_of_the_results():
    sittings = json.loads(step.RESULTS.read_text())
    assert len({one["cpu"] for one in sittings}) == len(sittings) >= 2
    page = step.PAGE.read_text()
    assert page == tables.inserted(page, step.texts(sittings))
