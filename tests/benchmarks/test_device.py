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
    assert device_tables.render(part, tmp_path / "cpu") == device_tables.NOTHING.format(part=part)
    assert not list((tmp_path / "cpu").glob("*.jsonl"))
    (tmp_path / "cpu" / "rehearsal").rename(tmp_path / "shown")
    found = measured(tmp_path / "shown" / f"{part}.jsonl")
    assert left == 0 and found and not [row for row in found if "error" in row]
    assert all(row["origin"]["versions"]["jax"] and row["origin"]["device"] and row["origin"]["date"] for row in found)
    table = device_tables.render(part, tmp_path).splitlines()
    assert len({line.count("|") for line in table[2:]}) == 1 and len(table) >= 5
    if part == "values":
        assert all(row["result"]["worst"] <= 1.0 for row in found)


def test_every_part_of_the_command_is_rehearsed():
    assert list(device.parts()) == list(PARTS) == list(device_tables.TABLES)


ORIGIN = {"device": "X", "versions": {"jax": "1"}, "commit": "c", "date": "2026-01-01T00:00:00"}


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
    for _ in range(2):
        assert Rows("part", tmp_path, later).run([case("a", 1), case("b", 2)]) == 0
    assert capsys.readouterr().out.count("part: case=a: passed over, ended the process 2 times") == 1
    failed, done = measured(tmp_path / "part.jsonl")
    assert failed["error"] == "ended the process 2 times" and failed["case"] == {"case": "a"}
    assert failed["origin"] and done["result"] == {"value": 2}
    assert Rows("pauses", tmp_path, later).run([case("a", 1)]) == 0
    assert len(measured(tmp_path / "pauses.jsonl")) == 1


def test_no_case_is_begun_when_the_time_is_up(tmp_path):
    assert Rows("part", tmp_path, time.monotonic() - 1).run([case("a", 1), case("b", 2)]) == 2
    assert not (tmp_path / "part.jsonl").exists()


def test_no_case_is_begun_that_would_end_later_by_the_times_in_the_file(tmp_path):
    lines = [{"case": {"case": "a"}, "result": {}, "seconds": 300.0}]
    lines += [{"case": {"op": "a", "peers": True}, "result": {}, "seconds": 2.0}]
    lines += [{"case": {"killed": 1}, "begun": True}]
    (tmp_path / "part.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    peer = Case({"op": "b", "peers": True}, lambda: {})
    soon = time.monotonic() + 60
    assert (
        Rows("part", tmp_path, soon).run(
            [case("b", 1), peer, Case({"new": 1}, lambda: {}), Case({"killed": 1}, lambda: {})]
        )
        == 3
    )
    assert measured(tmp_path / "part.jsonl")[-1]["case"] == peer.name
    assert Rows("part", tmp_path, soon).run([case("b", 1)._replace(resumes=True)]) == 0


def test_a_case_that_ended_the_process_counts_as_failed_where_it_was_begun(tmp_path):
    """Also where all others of the file were measured at another commit, and where it is the only one."""
    lines = [{"origin": ORIGIN}, *[{"case": {"case": "a"}, "begun": True}] * rows.TRIES]
    lines += [{"origin": {**ORIGIN, "commit": "later"}}, {"case": {"case": "a"}, "error": "ended the process 2 times"}]
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "training.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert device_tables.render("training", tmp_path) == (
        "X, jax 1, commit c, 2026-01-01. 1 of 1 cases failed; training.jsonl has their errors."
    )


def test_the_pages_are_what_the_results_make_of_them():
    assert device_tables.main(["--check"]) == 0


def test_a_page_without_figures_says_so(tmp_path):
    page = "before\n<!-- device: steps -->\nold\n<!-- end -->\nafter\n"
    text = device_tables.rewritten(page, tmp_path)
    assert "Not measured on any device yet" in text and text.startswith("before") and text.endswith("after\n")


def step_times(scheme, milliseconds):
    name = {"size": "s", "remat": "block", "kernels": "auto", "scheme": scheme}
    return {"case": name, "result": {"milliseconds": milliseconds, "mfu": 0.5, "temporary_bytes": 2**30}}


def test_steps_are_set_beside_plain_of_the_same_device_versions_and_commit(tmp_path):
    (tmp_path / "box").mkdir()
    lines = [{"origin": ORIGIN}, step_times("plain", 100.0), step_times("nag", 104.0)]
    lines.append({"case": {**lines[-1]["case"], "scheme": "lns"}, "error": "OOM"})
    others = {"device": "Y"}, {"versions": {"jax": "2"}}, {"commit": "d"}
    for other, milliseconds in zip(others, (10.0, 20.0, 30.0), strict=True):
        lines += [{"origin": ORIGIN | other}, step_times("nag", milliseconds)]
    lines += [{"origin": ORIGIN | {"date": "2026-01-02T00:00:00"}}, step_times("review", 110.0)]
    (tmp_path / "box" / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = device_tables.render("steps", tmp_path)
    tables = text.split("ms per step")[1:]
    assert len(tables) == 4
    assert "| nag | 104.0 | 1.040 | 50.0% | 1.0 GiB |" in tables[0] and "| review | 110.0 | 1.100 |" in tables[0]
    for table, milliseconds in zip(tables[1:], ("10.0", "20.0", "30.0"), strict=True):
        assert f"| nag | {milliseconds} | - |" in table
    said = [line for line in text.splitlines() if line and not line.startswith("|")]
    assert said == [
        "X, jax 1, commit c, 2026-01-02. 1 of 4 cases failed; steps.jsonl has their errors.",
        "Y, jax 1, commit c, 2026-01-01.",
        "X, jax 2, commit c, 2026-01-01.",
        "X, jax 1, commit d, 2026-01-01.",
    ]
