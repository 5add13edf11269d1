"""The measurements for an accelerator, rehearsed on this machine; their file format; the tables made of them."""

import json
import time

import pytest

from benchmarks import device, device_tables
from benchmarks.parts import rows
from benchmarks.parts.rows import Case, Paused, Rows, measured
from pallas_kernels import origin

PARTS = ("values", "kernels", "steps", "attention", "experts", "mod", "training", "profile")


@pytest.mark.parametrize("part", PARTS)
def test_a_rehearsal_measures_every_case_and_its_table_shows_them(part, tmp_path):
    left = device.main(["--part", part, "--out", str(tmp_path / "cpu"), "--rehearse", "--minutes", "30"])
    found = measured(tmp_path / "cpu" / f"{part}.jsonl")
    assert left == 0 and found and not [row for row in found if "error" in row]
    assert all(row["origin"]["versions"]["jax"] and row["origin"]["device"] and row["origin"]["date"] for row in found)
    table = device_tables.render(part, tmp_path).splitlines()
    assert len({line.count("|") for line in table[2:]}) == 1 and len(table) >= 5
    if part == "values":
        assert all(row["result"]["worst"] <= 1.0 for row in found)


def test_every_part_of_the_command_is_rehearsed():
    assert list(device.parts()) == list(PARTS) == list(device_tables.TABLES)


def case(name, outcome):
    def measure():
        if isinstance(outcome, BaseException):
            raise outcome
        return {"value": outcome}

    return Case({"case": name}, measure)


def test_a_part_that_was_killed_goes_on_behind_its_last_case(tmp_path, monkeypatch):
    later = time.monotonic() + 60
    starts = iter(range(2))
    monkeypatch.setattr(origin, "origin", lambda packages: {"start": next(starts)})
    with pytest.raises(KeyboardInterrupt):  # as after a kill, one case was begun and not finished
        Rows("part", tmp_path, later).run([case("a", 1), case("b", KeyboardInterrupt())])
    with (tmp_path / "part.jsonl").open("a") as file:
        file.write('{"case": {"ca')
    assert Rows("part", tmp_path, later).run([case("a", 99), case("b", 2), case("c", ValueError("no"))]) == 0
    found = {row["case"]["case"]: row.get("result") or row["error"] for row in measured(tmp_path / "part.jsonl")}
    assert found == {"a": {"value": 1}, "b": {"value": 2}, "c": "ValueError: no"}
    assert [row["origin"]["start"] for row in measured(tmp_path / "part.jsonl")] == [0, 1, 1]


def test_a_case_that_never_ends_is_passed_over_and_one_that_pauses_is_not(tmp_path, capsys):
    later = time.monotonic() + 60
    for _ in range(rows.TRIES):
        with pytest.raises(KeyboardInterrupt):
            Rows("part", tmp_path, later).run([case("a", KeyboardInterrupt())])
        assert Rows("pauses", tmp_path, later).run([case("a", Paused())]) == 1
    assert Rows("part", tmp_path, later).run([case("a", 1), case("b", 2)]) == 0
    assert "part: case=a: passed over, begun 2 times" in capsys.readouterr().out
    assert [row["case"]["case"] for row in measured(tmp_path / "part.jsonl")] == ["b"]
    assert Rows("pauses", tmp_path, later).run([case("a", 1)]) == 0
    assert len(measured(tmp_path / "pauses.jsonl")) == 1


def test_no_case_is_begun_when_the_time_is_up(tmp_path):
    assert Rows("part", tmp_path, time.monotonic() - 1).run([case("a", 1), case("b", 2)]) == 2
    assert not (tmp_path / "part.jsonl").exists()


def test_the_pages_are_what_the_results_make_of_them():
    assert device_tables.main(["--check"]) == 0


def test_a_page_without_figures_says_so(tmp_path):
    page = "before\n<!-- device: steps -->\nold\n<!-- end -->\nafter\n"
    text = device_tables.rewritten(page, tmp_path)
    assert "Not measured on any device yet" in text and text.startswith("before") and text.endswith("after\n")


def test_steps_are_set_beside_plain(tmp_path):
    (tmp_path / "box").mkdir()
    origin = {"device": "X", "versions": {"jax": "1"}, "commit": "c", "date": "2026-01-01T00:00:00"}
    lines = [{"origin": origin}]
    for scheme, milliseconds in (("plain", 100.0), ("nag", 104.0)):
        name = {"size": "s", "remat": "block", "kernels": "auto", "scheme": scheme}
        figures = {"milliseconds": milliseconds, "mfu": 0.5, "temporary_bytes": 2**30}
        lines.append({"case": name, "result": figures})
    lines.append({"case": {**name, "scheme": "lns"}, "error": "OOM"})
    (tmp_path / "box" / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = device_tables.render("steps", tmp_path)
    assert "| nag | 104.0 | 1.040 | 50.0% | 1.0 GiB |" in text and "1 of 3 cases failed" in text
