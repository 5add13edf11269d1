"""The file of a part: what is measured again, what is passed over, and what no case can take with it."""

import json
import subprocess
import sys
import threading
import time
import types

import pytest

from benchmarks import device
from benchmarks.parts import rows
from benchmarks.parts.rows import Case, Paused, Rows, Unusable, measured, note_end
from pallas_kernels import origin

ORIGIN = {"device": "X", "versions": {"jax": "1"}, "commit": "c", "sources": "s", "date": "2026-01-01T00:00:00"}


@pytest.fixture(autouse=True)
def no_garbage(monkeypatch):
    """To look for it behind every case takes longer than all else, for the other tests have left much that is none."""
    monkeypatch.setattr(rows, "gc", types.SimpleNamespace(collect=lambda: 0))


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
    assert capsys.readouterr().out.count("part: case=a: passed over, was begun 2 times and never finished") == 1
    failed, done = measured(tmp_path / "part.jsonl")
    assert failed["error"] == "was begun 2 times and never finished" and failed["case"] == {"case": "a"}
    assert failed["origin"] and done["result"] == {"value": 2}
    assert Rows("pauses", tmp_path, later).run([case("a", 1)]) == 0
    assert len(measured(tmp_path / "pauses.jsonl")) == 1


def test_after_a_case_behind_which_nothing_computes_another_process_goes_on(tmp_path, monkeypatch):
    later = time.monotonic() + 60
    works = iter((True, False, True))
    monkeypatch.setattr(rows, "usable", lambda: next(works))
    failing = [case("a", 1), case("b", ValueError("illegal address")), case("c", 3)]
    with pytest.raises(Unusable):
        Rows("part", tmp_path, later).run(failing)
    assert Rows("part", tmp_path, later).run(failing) == 0
    assert [row["case"]["case"] for row in measured(tmp_path / "part.jsonl")] == ["a", "b", "c"]
    assert rows.read(tmp_path / "part.jsonl")[-1]["result"] == {"value": 3}
    monkeypatch.undo()
    assert rows.usable()


def test_an_implementation_that_ends_process_after_process_is_passed_over(tmp_path, monkeypatch):
    """Each start costs as much as many cases; what ended nothing is measured, also of that implementation."""
    later = time.monotonic() + 60

    def of(implementation, number, outcome):
        return case(number, outcome)._replace(name={"implementation": implementation, "number": number})

    good, bad = [of("xla", 0, 1), of("mosaic", 1, 2)], [of("mosaic", number, KeyboardInterrupt()) for number in (2, 3)]
    sticky, killed = of("mosaic", 4, ValueError("illegal address")), of("mosaic", 6, KeyboardInterrupt())
    for _ in range(rows.TRIES):
        with pytest.raises(KeyboardInterrupt):
            Rows("part", tmp_path, later).run([*good, *bad, sticky])
        note_end(tmp_path / "part.jsonl", stopped=False)
    with pytest.raises(KeyboardInterrupt):
        Rows("part", tmp_path, later).run([killed])
    note_end(tmp_path / "part.jsonl", stopped=True)
    note_end(tmp_path / "part.jsonl", stopped=False)  # between cases nobody is to blame
    assert Rows("part", tmp_path, later).run([killed._replace(measure=lambda: {"value": 7})]) == 0
    monkeypatch.setattr(rows, "usable", lambda: False)
    with pytest.raises(Unusable):
        Rows("part", tmp_path, later).run([*good, bad[0], sticky])
    for number in (7, 8, 9):
        with pytest.raises(Unusable):
            Rows("part", tmp_path, later).run([of("xla", number, ValueError("no"))])
    monkeypatch.undo()
    assert Rows("part", tmp_path, later).run([*good, *bad, sticky, of("mosaic", 5, 5), of("xla", 5, 6)]) == 0
    found = {
        tuple(row["case"].values()): row.get("error") or row["result"] for row in measured(tmp_path / "part.jsonl")
    }
    assert found["xla", 0] == {"value": 1} and found["xla", 5] == {"value": 6} and found["mosaic", 1] == {"value": 2}
    assert (
        found["mosaic", 2] == "was begun 2 times and never finished"
        and found["mosaic", 4] == "ValueError: illegal address"
    )
    assert found["mosaic", 3] == found["mosaic", 5] == "mosaic ended the process 3 times"
    assert found["mosaic", 6] == {"value": 7}


def test_programs_are_compiled_ahead_by_other_threads_until_one_ends_a_process(tmp_path):
    """Their errors are those of their cases, and what is finished is not compiled."""
    later, here = time.monotonic() + 60, threading.get_ident()
    both_began, threads = threading.Barrier(2, timeout=30), {}

    def compiling(number):
        def compile():
            threads[number] = threading.get_ident()
            if threads[number] != here and number in (1, 2):
                both_began.wait()
            if number == 3:
                raise ValueError("no program")
            return number

        return case(number, 0)._replace(measure=lambda made: {"value": made}, compile=compile)

    cases = [compiling(0), case("plain", "p"), *map(compiling, (1, 2, 3, 4))]
    assert Rows("part", tmp_path, later).run(cases[:1]) == 0
    threads.clear()
    assert Rows("part", tmp_path, later).run(cases) == 0
    found = {
        row["case"]["case"]: row.get("error") or row["result"]["value"] for row in measured(tmp_path / "part.jsonl")
    }
    assert found == {0: 0, "plain": "p", 1: 1, 2: 2, 3: "ValueError: no program", 4: 4}
    assert here not in threads.values() and 0 not in threads
    with (tmp_path / "part.jsonl").open("a") as file:
        file.write('{"case": {"case": "x"}, "begun": true}\n')
    note_end(tmp_path / "part.jsonl", stopped=False)
    assert Rows("part", tmp_path, later).run([compiling(5), compiling(6)]) == 0
    assert threads[5] == threads[6] == here


def test_a_case_that_hangs_ends_its_process_and_has_its_line(tmp_path, monkeypatch):
    script = tmp_path / "hang.py"
    script.write_text(HANGING)
    command = [sys.executable, str(script), str(tmp_path)]
    assert subprocess.run(command, cwd=device.ROOT).returncode == rows.AGAIN
    monkeypatch.setattr(origin, "origin", lambda packages: {})  # as there
    hangs = Case({"case": "hangs"}, lambda: pytest.fail("begun again"))
    assert Rows("part", tmp_path, time.monotonic() + 60, 0.5).run([hangs, Case({"case": "after"}, dict)]) == 0
    hung, after = measured(tmp_path / "part.jsonl")
    assert hung["error"] == "took longer than 0.5 s" and after["result"] == {}


HANGING = """
import pathlib, sys, time
sys.path.insert(0, ".")
from benchmarks.parts.rows import Case, Rows
from pallas_kernels import origin
origin.origin = lambda packages: {}
cases = [Case({"case": "hangs"}, lambda: time.sleep(1000)), Case({"case": "after"}, dict)]
Rows("part", pathlib.Path(sys.argv[1]), time.monotonic() + 60, 0.5).run(cases)
"""


def test_a_case_of_another_device_is_measured_again(tmp_path):
    lines = [{"origin": ORIGIN}, {"case": {"case": "a"}, "result": {"value": 1}, "seconds": 1.0}]
    (tmp_path / "part.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Rows("part", tmp_path, time.monotonic() + 60).run([case("a", 2)]) == 0
    assert Rows("part", tmp_path, time.monotonic() + 60).run([case("a", 3)]) == 0
    assert [row["result"]["value"] for row in measured(tmp_path / "part.jsonl")] == [1, 2]


def test_what_failed_is_measured_again_with_other_sources(tmp_path, monkeypatch):
    """Nor is an implementation given up there, or a case that was begun and never finished; figures are kept."""
    now = ORIGIN | {"date": "2027-01-01T00:00:00"}
    of = lambda name, outcome: case(name, outcome)._replace(name={"case": name, "implementation": "mosaic"})  # noqa: E731
    lines = [{"origin": ORIGIN}, {"case": of("a", 1).name, "result": {"value": 1}}]
    lines += [{"case": of(name, 1).name, "error": "no", "ended": True} for name in "bcd"]
    lines += [{"case": of("e", 1).name, "begun": True}] * rows.TRIES
    text = "".join(json.dumps(line) + "\n" for line in lines)
    wanted = [of(name, 2) for name in "abcdef"]
    for where, expected in (
        (now, [1, "no", "no", "no", "was begun 2 times and never finished", "mosaic ended the process 3 times"]),
        (now | {"commit": "c-dirty", "sources": "changed"}, [1, "no", "no", "no", 2, 2, 2, 2, 2]),
        (now | {"versions": {"jax": "2"}}, [1, "no", "no", "no", 2, 2, 2, 2, 2]),
    ):
        (tmp_path / "part.jsonl").write_text(text)
        monkeypatch.setattr(origin, "origin", lambda packages, where=where: where)
        monkeypatch.setattr(origin, "sources", lambda where=where: where["sources"])
        assert Rows("part", tmp_path, time.monotonic() + 60).run(wanted) == 0
        found = [row.get("error") or row["result"]["value"] for row in measured(tmp_path / "part.jsonl")]
        assert found == expected


def test_no_case_is_begun_when_the_time_is_up(tmp_path):
    assert Rows("part", tmp_path, time.monotonic() - 1).run([case("a", 1), case("b", 2)]) == 2
    assert not (tmp_path / "part.jsonl").exists()


def test_no_case_is_begun_that_would_end_later_by_the_times_in_the_file(tmp_path, monkeypatch):
    """By the last time of the same size, or of whatever was measured last."""
    step = lambda size, scheme: Case({"size": size, "scheme": scheme}, lambda: {})  # noqa: E731
    monkeypatch.setattr(origin, "origin", lambda packages: ORIGIN)
    lines = [{"origin": ORIGIN}, {"case": step("1B", "plain").name, "result": {}, "seconds": 900.0}]
    lines += [{"case": step("1B", "nag").name, "result": {}, "seconds": 300.0}]
    lines += [{"case": step("350M", "plain").name, "result": {}, "seconds": 200.0}]
    lines += [{"case": step("350M", "nag").name, "result": {}, "seconds": 2.0}]
    (tmp_path / "part.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    soon = time.monotonic() + 60
    assert Rows("part", tmp_path, soon).run([step("1B", "lns"), step("350M", "lns"), step("7B", "lns")]) == 1
    assert [row["case"]["size"] for row in measured(tmp_path / "part.jsonl")[4:]] == ["350M", "7B"]
    slow = [{"case": step("7B", "nag").name, "result": {}, "seconds": 300.0}]
    slow += [{"case": step("7B", "review").name, "error": "out of memory", "seconds": 0.1}]
    with (tmp_path / "part.jsonl").open("a") as file:
        file.writelines(json.dumps(line) + "\n" for line in slow)
    new = Case({"size": "new"}, lambda: {})
    assert Rows("part", tmp_path, soon).run([step("7B", "lns"), step("7B", "plain"), new]) == 2
    assert Rows("part", tmp_path, soon).run([step("350M", "rezero"), new]) == 0
    assert Rows("part", tmp_path, soon).run([step("1B", "lns")._replace(resumes=True)]) == 0
