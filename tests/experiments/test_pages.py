"""No number without its result file: README and pages are generated, and each summary follows from its runs."""

import dataclasses
import json
import re

import pytest

from experiments.harness.jobs import Record
from experiments.harness.pages import (
    NOT_MEASURED,
    _again,
    _machines,
    _one_below,
    _replanned,
    _since,
    _unclean,
    log_entries,
    page,
    readme,
    short,
    standing,
    superseded,
    table,
)
from experiments.harness.recipe import HOME, judged, load, names
from experiments.harness.results import Summary, plot_file, read_result, write_summary
from experiments.harness.sweep import settings_from

RESULTS = sorted((HOME / "results").glob("*.json"))


def test_the_readme_table_is_what_the_program_generates():
    text = (HOME / "README.md").read_text(encoding="utf-8")
    assert readme(text) == text, "run python -m experiments.harness.pages"


@pytest.mark.parametrize("name", names())
def test_a_page_is_what_the_program_generates(name):
    text = (HOME / "pages" / f"{name}.md").read_text(encoding="utf-8")
    assert page(name) == text, "run python -m experiments.harness.pages"
    linked = re.findall(r"\]\(\.\./([\w./]+)\)", text)
    assert all((HOME / path).exists() for path in linked)


def test_a_page_for_every_recipe_and_no_other():
    assert {path.stem for path in (HOME / "pages").glob("*.md")} == set(names())


@pytest.mark.parametrize("name", names())
def test_a_claim_has_at_most_twenty_words(name):
    assert len(load(name).header["claim"].split()) <= 20


@pytest.mark.parametrize("path", RESULTS, ids=[path.stem for path in RESULTS])
def test_the_summary_of_a_result_file_follows_from_its_runs(path):
    result = read_result(path)
    assert path.name == f"{result['recipe']}.{result['size']}.json"
    assert {"device", "versions", "commit", "date"} <= result["records"][0].origin.keys()
    recipe = load(result["recipe"])
    again = judged(recipe, settings_from(recipe, result["settings"]), result["records"], result["floors"])
    assert json.loads(json.dumps(dataclasses.asdict(again))) == result["summary"]
    assert plot_file(HOME, result["recipe"], result["size"]).exists()


def test_a_page_says_what_today_s_command_would_do_otherwise():
    recipe = load("review_depth")
    result = read_result(HOME / "results" / "review_depth.cpu.json")
    assert "seeds 1 (today 5)" in _since(recipe, "cpu", result) and "arms" in _since(recipe, "cpu", result)
    given = result | {"command": result["command"] + " --seeds 1"}
    assert "seeds" not in _since(recipe, "cpu", given)
    today = result | {"settings": dataclasses.asdict(recipe.sizes["cpu"])}
    assert _since(recipe, "cpu", today) == ""


def test_a_page_says_what_today_s_code_would_plan_otherwise_and_what_was_computed_again():
    recipe, result = load("prune"), read_result(HOME / "results" / "prune.cpu.json")
    assert _replanned(recipe, result) == "" and _again(result) == ""
    longer = [dataclasses.replace(one, config=one.config | {"train.steps": 7}) for one in result["records"][:2]]
    told = _replanned(recipe, result | {"records": [*longer, *result["records"][2:]]})
    assert f"train.steps was 7 and is now 300 (2 of {len(result['records'])} runs)" in told
    again = {"computed_again": {"commit": "abcdef0123", "what": "losses"}}
    assert "abcdef0: losses" in _again({"records": [Record("", {}, {}, {}, origin=again)]})


def test_a_size_whose_runs_another_holds_does_not_stand_beside_it():
    """The claim is judged once on the same runs: by the size that has the most of them."""
    of = lambda *losses: {"records": [Record(f"s{i}", {}, {}, {"loss": loss}) for i, loss in enumerate(losses)]}  # noqa: E731
    found = {"cpu": of(1.0), "longer": of(1.0, 2.0), "longest": of(1.0, 2.0, 3.0), "other": of(1.5), "same": of(1.5)}
    assert superseded(found) == {"cpu": "longest", "longer": "longest"}
    assert {*standing(found)} == {"longest", "other", "same"}
    rows = [line for line in table().splitlines() if "tokens_and_depth.md" in line]
    assert len(rows) == 2 and "## Size longer: supported; superseded by cpu16" in page("tokens_and_depth")


def test_a_page_says_which_arms_ran_on_which_processors():
    of = lambda arm, cpu: Record("", {"arm": arm, "seed": 1}, {}, {"loss": 1.0}, origin={"cpu": cpu})  # noqa: E731
    assert _machines({"records": [of("a", "A"), of("b", "A")]}) == ""
    assert "(on A: a, b; on B: b)" in _machines({"records": [of("a", "A"), of("b", "A"), of("b", "B")]})


def test_a_page_says_how_many_jobs_were_done_with_uncommitted_changes():
    def of(*commits):
        return {"records": [Record("", {}, {}, {}, origin={"commit": commit}) for commit in commits]}

    assert _unclean(of("abc", "abc-dirty", "abc-dirty")).startswith(". 2 of 3 jobs ")
    assert _unclean(of("abc", "")) == ""


def test_without_result_files_nothing_is_measured(tmp_path):
    rows = table(tmp_path).splitlines()[2:]
    assert rows and all(row.count(NOT_MEASURED) == 1 for row in rows)


def test_the_log_s_entries_of_a_recipe():
    texts = {"One, 2026": "`prune` at 24.", "Two": "Of `prune.x`.", "Three": "In `results/prune.cpu.json`."}
    log = "# Log\n\n" + "".join(f"## {title}\n\n{text}\n\n" for title, text in texts.items())
    assert [title for title, _ in log_entries("prune", log)] == ["One, 2026", "Two", "Three"]
    assert log_entries("field", log) == []


def test_a_long_list_of_edges_is_cut():
    assert (
        short("best rate at the grid's edge: a 8, b 8, c 8, d 8, e 8")
        == "best rate at the grid's edge: a 8, b 8, c 8 and 2 more"
    )
    assert short("4 fresh seeds, 5 needed") == "4 fresh seeds, 5 needed"


def test_a_summary_is_put_into_a_result_file_and_all_else_stays(tmp_path):
    (tmp_path / "results").mkdir()
    assert len(RESULTS) > 4
    for path in RESULTS[:4]:
        copy = tmp_path / "results" / path.name
        copy.write_bytes(path.read_bytes())
        name, size, _ = path.name.split(".")
        summary = Summary(**json.loads(path.read_text())["summary"])
        write_summary(tmp_path, name, size, summary)
        assert copy.read_bytes() == path.read_bytes()
        write_summary(tmp_path, name, size, dataclasses.replace(summary, headline="another"))
        before, after = (read_result(file) for file in (path, copy))
        assert after.pop("summary") == before.pop("summary") | {"headline": "another"} and after == before


def test_links_of_the_log_are_followed_from_a_page():
    text = "[a](../models/x.md) [b](pages/y.md) [c](https://z.org) [d](#here)"
    assert _one_below(text) == "[a](../../models/x.md) [b](../pages/y.md) [c](https://z.org) [d](#here)"
