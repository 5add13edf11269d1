"""The measurements for an accelerator, rehearsed on this machine; their file format; the tables made of them."""

import json
import subprocess
import sys
import threading
import time
import types

import pytest

from benchmarks import device, device_tables
from benchmarks.parts import kernels, rows, steps, worker
from benchmarks.parts.rows import Case, Options, Paused, Rows, Unusable, measured, note_end
from pallas_kernels import origin
from pallas_kernels.ops import all_ops

PARTS = ("values", "kernels", "steps", "attention", "experts", "mod", "training", "profile")


@pytest.mark.parametrize("part", PARTS)
def test_a_rehearsal_measures_every_case_and_its_table_shows_them(part, tmp_path):
    folders = ["--out", str(tmp_path / "cpu"), "--scratch", str(tmp_path / "scratch")]
    left = device.main(["--part", part, *folders, "--rehearse", "--minutes", "30"])
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
    assert list(worker.PARTS) == list(PARTS) == list(device_tables.TABLES)


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


def test_after_a_case_behind_which_nothing_computes_another_process_goes_on(tmp_path, monkeypatch):
    later = time.monotonic() + 60
    monkeypatch.setattr(rows, "usable", lambda: False)
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
    assert found["mosaic", 2] == "ended the process 2 times" and found["mosaic", 4] == "ValueError: illegal address"
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


def test_a_case_that_hangs_ends_its_process_and_has_its_line(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(HANGING)
    found = [subprocess.run([sys.executable, str(script), str(tmp_path)], cwd=device.ROOT).returncode for _ in "ab"]
    assert found == [rows.AGAIN, 0]
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


def test_a_part_is_started_again_as_long_as_it_comes_further(tmp_path, monkeypatch, capfd):
    codes = iter([rows.AGAIN, 0, -11, worker.LEFT])  # 0: a training that was stopped before its first step

    def started(command, env, timeout):
        code = next(codes, -6)
        if code != -6:
            with (tmp_path / "values.jsonl").open("a") as file:
                file.write("{}\n")
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(device.subprocess, "run", started)
    assert device.main(["--part", "values", "--out", str(tmp_path), "--scratch", str(tmp_path)]) == 1
    assert next(codes, None) is None
    assert device.main(["--part", "values", "--out", str(tmp_path), "--scratch", str(tmp_path)]) == 1
    assert "values: ended with exit code -6 before its first case" in capfd.readouterr().out


def test_a_case_of_another_device_is_measured_again(tmp_path):
    lines = [{"origin": ORIGIN}, {"case": {"case": "a"}, "result": {"value": 1}, "seconds": 1.0}]
    (tmp_path / "part.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert Rows("part", tmp_path, time.monotonic() + 60).run([case("a", 2)]) == 0
    assert Rows("part", tmp_path, time.monotonic() + 60).run([case("a", 3)]) == 0
    assert [row["result"]["value"] for row in measured(tmp_path / "part.jsonl")] == [1, 2]


def test_what_does_not_fit_into_the_device_is_not_compiled(monkeypatch):
    named = lambda: {tuple(case.name[of] for of in ("size", "remat")) for case in steps.cases(options)}  # noqa: E731
    options = Options(False, None, 0.0)
    everything = named()
    monkeypatch.setattr(steps, "device_bytes", lambda: 0.92 * 80e9)
    assert everything - named() == {("1B", "none")}
    first = [case.name["size"] for case in steps.cases(options)]
    assert first[: 2 * len(steps.SCHEMES)] == ["350M"] * len(steps.SCHEMES) + ["1B"] * len(steps.SCHEMES)


def test_the_environment_of_a_part(monkeypatch):
    environment = device.environment
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    assert environment("steps")["JAX_COMPILATION_CACHE_DIR"] == "mine"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    assert environment("steps")["JAX_COMPILATION_CACHE_DIR"] == environment("profile")["JAX_COMPILATION_CACHE_DIR"]
    monkeypatch.setenv("XLA_FLAGS", "--xla_a")
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert environment("kernels")["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "XLA_CLIENT_MEM_FRACTION" not in environment("kernels")
    assert environment("steps")["XLA_CLIENT_MEM_FRACTION"] == "0.92"
    assert environment("profile")["XLA_FLAGS"] == "--xla_a --xla_gpu_enable_command_buffer="
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # both are an error
    assert "XLA_CLIENT_MEM_FRACTION" not in environment("steps")


def test_where_the_compilers_libraries_are(monkeypatch, tmp_path):
    """PyTorch's packages bring a folder that jax takes for a whole CUDA."""
    monkeypatch.delenv("CUDA_ROOT", raising=False)
    packages, cuda = tmp_path / "site" / "nvidia", tmp_path / "cuda"
    (packages / "cu13" / "lib").mkdir(parents=True)
    (cuda / "bin").mkdir(parents=True)
    (cuda / "bin" / "nvcc").touch(0o755)
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setenv("PATH", str(cuda / "bin"))
    assert "CUDA_ROOT" not in device.environment("values")
    found = types.SimpleNamespace(submodule_search_locations=[str(packages)])
    monkeypatch.setattr(device.importlib.util, "find_spec", lambda name: found)
    assert device.environment("values")["CUDA_ROOT"] == str(cuda)
    (packages / "cu13" / "bin").mkdir()
    (packages / "cu13" / "bin" / "ptxas").touch()
    assert "CUDA_ROOT" not in device.environment("values")


def test_kernels_are_measured_one_by_one_against_the_reference(monkeypatch):
    """The reference is timed once for all of a process."""
    named = [case.name for case in kernels.cases(Options(False, None, 0.0))]
    assert [name["op"] for name in named[:2]] == ["nag_update_modulated"] * 2
    first = [(name["op"], name["width"]) for name in named]
    assert first.index(("nag_update", 4096)) < first.index(("put_rows", 1024)) < first.index(("nag_update", 2048))
    assert set(first) == {(op, width) for op in all_ops() for width in (640, 1024, 2048, 4096, 8192)}
    calls = []
    monkeypatch.setattr(kernels, "timed", lambda op, name, *_, **__: calls.append(name) or {"forward": len(calls)})
    monkeypatch.setattr(kernels, "copy", lambda: 1.0)
    monkeypatch.setattr(kernels, "_references", {})

    def ratio(name):
        found = kernels.measure("nag_update", name, (64, 96, "float32"))
        return found["implementations"][name]["forward"]["vs_reference"]

    assert [ratio("reference"), ratio("xla"), ratio("mosaic_gpu")] == [1, 2, 3] and len(calls) == 3
    kernels._references.clear()
    assert ratio("xla") == 4 / 5 and calls[3:] == ["xla", "reference"]


def test_no_case_is_begun_when_the_time_is_up(tmp_path):
    assert Rows("part", tmp_path, time.monotonic() - 1).run([case("a", 1), case("b", 2)]) == 2
    assert not (tmp_path / "part.jsonl").exists()


def test_no_case_is_begun_that_would_end_later_by_the_times_in_the_file(tmp_path):
    """By the last time of the same size, or of whatever was measured last."""
    step = lambda size, scheme: Case({"size": size, "scheme": scheme}, lambda: {})  # noqa: E731
    lines = [{"case": step("1B", "plain").name, "result": {}, "seconds": 900.0}]
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


def test_the_table_of_kernels_has_those_that_failed(tmp_path):
    shape = {"op": "nag_update", "rows": 64, "width": 96, "dtype": "float32"}
    passes = {"forward": {"us": 2.0, "of_copy": 0.5, "vs_reference": 0.25}, "forward+backward": {"us": 5.0}}
    lines = [{"origin": ORIGIN}, {"case": shape | {"implementation": "mosaic_gpu"}, "error": "RuntimeError: no"}]
    lines += [{"case": shape | {"implementation": "xla"}, "result": {"implementations": {"xla": passes}}}]
    lines += [{"case": shape | {"peers": True}, "error": "ImportError: torch"}]
    (tmp_path / "box").mkdir()
    (tmp_path / "box" / "kernels.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert device_tables.render("kernels", tmp_path).splitlines()[4:] == [
        "| nag_update | 64 x 96 float32 | mosaic_gpu | failed | - | - | - |",
        "| nag_update | 64 x 96 float32 | xla | forward | 2.0 | 50% | 0.25 |",
        "| nag_update | 64 x 96 float32 | peers | failed | - | - | - |",
    ]


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


def test_steps_are_set_beside_plain_of_the_same_process(tmp_path):
    """Not of another device, versions or commit, and not of another start, perhaps on another machine of that kind."""
    (tmp_path / "box").mkdir()
    lines = [{"origin": ORIGIN}, step_times("plain", 100.0), step_times("nag", 104.0)]
    lines.append({"case": {**lines[-1]["case"], "scheme": "lns"}, "error": "OOM"})
    others = {"device": "Y"}, {"versions": {"jax": "2"}}, {"commit": "d"}
    for other, milliseconds in zip(others, (10.0, 20.0, 30.0), strict=True):
        lines += [{"origin": ORIGIN | other}, step_times("nag", milliseconds)]
    lines += [{"origin": ORIGIN | {"date": "2026-01-02T00:00:00"}}, step_times("review", 110.0)]
    lines += [
        {"origin": ORIGIN | {"date": "2026-01-02T01:00:00"}},
        step_times("plain", 100.0),
        step_times("rezero", 90),
    ]
    (tmp_path / "box" / "steps.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    text = device_tables.render("steps", tmp_path)
    tables = text.split("ms per step")[1:]
    assert len(tables) == 4
    assert "| nag | 104.0 | 1.040 | 50.0% | 1.0 GiB |" in tables[0] and "| review | 110.0 | - |" in tables[0]
    assert "| rezero | 90.0 | 0.900 |" in tables[0]
    for table, milliseconds in zip(tables[1:], ("10.0", "20.0", "30.0"), strict=True):
        assert f"| nag | {milliseconds} | - |" in table
    said = [line for line in text.splitlines() if line and not line.startswith("|")]
    assert said == [
        "X, jax 1, commit c, 2026-01-02. 1 of 6 cases failed; steps.jsonl has their errors.",
        "Y, jax 1, commit c, 2026-01-01.",
        "X, jax 2, commit c, 2026-01-01.",
        "X, jax 1, commit d, 2026-01-01.",
    ]
