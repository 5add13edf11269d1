"""The file of a part: what is measured again, what is passed over, and what no case can take with it."""

import json
import subprocess
import sys
import threading
import time
import types

import jax
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
        assert Rows("pauses", tmp_path, later).run([case("a", Paused({"loss": 2.0}))]) == 1
        assert rows.last(tmp_path / "pauses.jsonl")["partial"] == {"loss": 2.0}
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


def test_whether_the_device_computes_is_asked_without_compiling_again(monkeypatch):
    compiled = []
    monkeypatch.setattr(jax, "jit", lambda function: compiled.append(function) or function)
    rows._next.cache_clear()
    assert rows.usable() and rows.usable() and len(compiled) == 1
    monkeypatch.undo()
    rows._next.cache_clear()
    assert rows.usable()
    monkeypatch.setattr(rows, "_next", lambda: 1 / 0)
    assert not rows.usable()


def of(implementation, op, number, outcome=None):
    return case(number, outcome)._replace(name={"implementation": implementation, "op": op, "number": number})


def outcomes(path):
    return {tuple(row["case"].values()): row.get("error") or row["result"]["value"] for row in measured(path)}


def test_an_op_s_implementation_that_ends_process_after_process_is_passed_over(tmp_path, monkeypatch):
    """Each start costs as much as many cases; what ended nothing is measured, also of that implementation."""
    later, path = time.monotonic() + 60, tmp_path / "part.jsonl"
    good, bad = [of("xla", "norm", 0, 1), of("mosaic", "norm", 1, 2)], of("mosaic", "norm", 2, KeyboardInterrupt())
    killed, sticky = of("mosaic", "nag", 6, KeyboardInterrupt()), of("mosaic", "put", 4, ValueError("illegal address"))
    for _ in range(rows.TRIES):
        with pytest.raises(KeyboardInterrupt):
            Rows("part", tmp_path, later).run([*good, bad])
        note_end(path, stopped=False)
    with pytest.raises(KeyboardInterrupt):
        Rows("part", tmp_path, later).run([killed])
    note_end(path, stopped=True)
    note_end(path, stopped=False)  # between cases nobody is to blame
    assert Rows("part", tmp_path, later).run([killed._replace(measure=lambda: {"value": 7})]) == 0
    monkeypatch.setattr(rows, "usable", lambda: False)
    for failing in (sticky, *(of("xla", "norm", number, ValueError("no")) for number in (7, 8, 9))):
        with pytest.raises(Unusable):
            Rows("part", tmp_path, later).run([*good, bad, failing])
    monkeypatch.undo()
    more = [of("mosaic", "norm", 3, 3), of("mosaic", "put", 5, 5), of("xla", "norm", 5, 6)]
    assert Rows("part", tmp_path, later).run([*good, bad, sticky, *more]) == 0
    assert outcomes(path) == {
        ("xla", "norm", 0): 1,
        ("mosaic", "norm", 1): 2,
        ("mosaic", "norm", 2): "was begun 2 times and never finished",
        ("mosaic", "norm", 3): "mosaic of norm hung, or ended the process 2 times",
        ("mosaic", "nag", 6): 7,
        ("mosaic", "put", 4): "ValueError: illegal address",
        ("mosaic", "put", 5): 5,
        ("xla", "norm", 5): 6,
        **{("xla", "norm", number): "ValueError: no" for number in (7, 8, 9)},
    }


def test_an_implementation_that_hung_with_one_op_or_failed_with_many_is_passed_over_in_every_part(tmp_path):
    """One that hung has cost more than several that ended; another folder is another machine."""
    later, lines = time.monotonic() + 60, [{"origin": Rows("values", tmp_path, 0.0).origin}]
    hung, twice = {"error": "took longer than 40 s", "ended": True, "hung": True}, {"error": "no", "ended": True}
    lines += [{"case": of("mosaic", "norm", 0).name, **hung}, {"case": of("mosaic", "put", 0).name, **hung}]
    (tmp_path / "values.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    wanted = [of("mosaic", "norm", 1, 1), of("mosaic", "nag", 2, 2), of("composed", "norm", 3, 3)]
    assert Rows("kernels", tmp_path, later).run(wanted) == 0
    found = list(outcomes(tmp_path / "kernels.jsonl").values())
    assert found == ["mosaic of norm hung, or ended the process 2 times", 2, 3]
    for op in ("nag", "take"):
        rows.append(tmp_path / "values.jsonl", {"case": of("mosaic", op, 0).name, **twice})
    wanted = [of("mosaic", "nag", 4, 4), of("mosaic", "review", 5, 5), of("composed", "review", 6, 6)]
    for part, folder, found in (
        ("steps", tmp_path, ["mosaic hung or ended the process with several other ops"] * 2 + [6]),
        ("steps", tmp_path / "other", [4, 5, 6]),
    ):
        assert Rows(part, folder, later).run(wanted) == 0
        assert list(outcomes(folder / f"{part}.jsonl").values()) == found


def test_programs_are_compiled_ahead_by_other_threads_until_compiling_ends_a_process(tmp_path):
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

    def ends():
        raise KeyboardInterrupt

    for number, ending in ((5, {"measure": lambda made: ends()}), (7, {"compile": ends})):
        with pytest.raises(KeyboardInterrupt):
            Rows("part", tmp_path, later).run([compiling(number)._replace(**ending)])
        note_end(tmp_path / "part.jsonl", stopped=False)
        assert Rows("part", tmp_path, later).run([compiling(number), compiling(number + 1)]) == 0
    assert here not in (threads[5], threads[6]) and threads[7] == threads[8] == here


def test_a_case_that_hangs_ends_its_process_and_has_its_line(tmp_path, monkeypatch):
    script = tmp_path / "hang.py"
    script.write_text(HANGING)
    command = [sys.executable, str(script), str(tmp_path)]
    assert subprocess.run(command, cwd=device.ROOT).returncode == rows.AGAIN
    assert not any("hung" in row for row in rows.read(tmp_path / "part.jsonl")), "it may have been compiling"
    assert subprocess.run(command, cwd=device.ROOT).returncode == rows.AGAIN
    monkeypatch.setattr(origin, "origin", lambda packages: {})  # as there
    hangs = Case({"case": "hangs"}, lambda: pytest.fail("begun again"))
    assert Rows("part", tmp_path, time.monotonic() + 60, 0.5).run([hangs, Case({"case": "after"}, dict)]) == 0
    hung, after = measured(tmp_path / "part.jsonl")
    assert hung["error"] == "took longer than 0.5 s" and hung["hung"] and hung["ended"] and after["result"] == {}


HANGING = """
import pathlib, sys, time
sys.path.insert(0, ".")
from benchmarks.parts.rows import Case, Rows
from pallas_kernels import origin
origin.origin = lambda packages: {}
slow = Case({"case": "slow"}, lambda: time.sleep(0.2) or {}, limit=50.0)
cases = [Case({"case": "hangs"}, lambda: time.sleep(1000), limit=0.5), Case({"case": "after"}, dict)]
Rows("other", pathlib.Path(sys.argv[1]), time.monotonic() + 60, 0.1).run([slow])
Rows("part", pathlib.Path(sys.argv[1]), time.monotonic() + 60, 50.0).run(cases)
"""


def test_a_case_that_compiles_for_too_long_is_tried_once_more_by_itself(tmp_path, monkeypatch):
    """Beside seven others a compilation may be slow; it is the second time that tells."""
    monkeypatch.setattr(rows.os, "_exit", lambda code: None)
    slow = case("slow", 1)._replace(compile=lambda: 1)
    for number in (1, 2):
        part = Rows("part", tmp_path, time.monotonic() + 60, 50.0)
        part._append({"origin": part.origin})
        part._append({"case": slow.name, "begun": True})
        part._end(slow, 50.0)
        assert not any("hung" in line or "error" in line for line in rows.read(part.path))
        finished, begun, _ = Rows("part", tmp_path, time.monotonic() + 60)._known()
        assert not finished and sum(begun.values()) == number
        assert Rows("part", tmp_path, time.monotonic() + 60)._ended()[1]  # the next compiles one at a time
    assert Rows("part", tmp_path, time.monotonic() + 60).run([slow]) == 0
    assert "never finished" in measured(tmp_path / "part.jsonl")[-1]["error"]


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
    given_up = ["was begun 2 times and never finished", "mosaic hung, or ended the process 2 times"]
    for where, expected in (
        (now, [1, "no", "no", "no", *given_up]),
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
