"""The measurements for an accelerator, rehearsed on this machine, and how their parts are started."""

import functools
import os
import subprocess
import types

import pytest

from benchmarks import device, device_tables, wheels
from benchmarks.parts import kernels, rows, steps, worker
from benchmarks.parts.rows import Options, Rows, measured
from pallas_kernels import timing
from pallas_kernels.ops import all_ops

PARTS = ("values", "kernels", "steps", "attention", "experts", "mod", "training", "profile")


def here(command, env, timeout):
    """The part's process, without a process of its own."""
    return subprocess.CompletedProcess(command, worker.main(*command[3:]))


@pytest.mark.parametrize("part", PARTS)
def test_a_rehearsal_measures_every_case_and_its_table_shows_them(part, tmp_path, monkeypatch):
    if part != "profile":  # whose environment has a flag for XLA, and a process with an unknown one ends
        own = types.SimpleNamespace(run=here, TimeoutExpired=subprocess.TimeoutExpired)
        monkeypatch.setattr(device, "subprocess", own)
    monkeypatch.setattr(steps, "SCHEMES", steps.SCHEMES[:2])
    monkeypatch.setattr(timing, "ROUND_SECONDS", 0.0)  # or a tiny program runs for as long as a large one
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


def test_what_does_not_fit_into_the_device_is_not_compiled(monkeypatch):
    named = lambda: {tuple(case.name[of] for of in ("size", "remat")) for case in steps.cases(options)}  # noqa: E731
    options = Options(False, None, 0.0)
    everything = named()
    monkeypatch.setattr(steps, "device_bytes", lambda: 0.92 * 80e9)
    assert everything - named() == {("1B", "none")}


def test_the_eight_steps_for_which_the_time_is_enough_show_what_kernels_do_and_a_larger_size():
    names = [tuple(case.name.values()) for case in steps.cases(Options(False, None, 0.0))]
    first = [("350M", scheme, "auto", "block") for scheme in steps.SCHEMES]
    for case in (("350M", "xla"), ("1B", "auto")):
        first += [(case[0], scheme, case[1], "block") for scheme in ("plain", "nag")]
    assert names[:8] == first
    all_of = [(s, scheme, k, r) for s, r, k, _ in steps.SETTINGS for scheme in steps.SCHEMES]
    assert len(names) == len(set(names)) and set(names) == set(all_of)


def test_the_environment_of_a_part(monkeypatch):
    environment = device.environment
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "mine")
    assert environment("steps")["JAX_COMPILATION_CACHE_DIR"] == "mine"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    assert environment("steps")["JAX_COMPILATION_CACHE_DIR"] == environment("profile")["JAX_COMPILATION_CACHE_DIR"]
    for name in ("XLA_PYTHON_CLIENT_PREALLOCATE", "XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    assert environment("kernels")["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert "XLA_CLIENT_MEM_FRACTION" not in environment("kernels")
    assert environment("steps")["XLA_CLIENT_MEM_FRACTION"] == "0.92"
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")  # both are an error
    assert "XLA_CLIENT_MEM_FRACTION" not in environment("steps")
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    assert "JAX_PLATFORMS" not in environment("values")
    for named, taken in (("cuda", "cuda,cpu"), ("cuda,cpu", "cuda,cpu"), ("cpu", "cpu")):
        monkeypatch.setenv("JAX_PLATFORMS", named)
        assert environment("values")["JAX_PLATFORMS"] == taken


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
    timed = lambda op, name, *_, **__: calls.append(name) or ({"forward": timing.Taken(len(calls), False)}, None)  # noqa: E731
    monkeypatch.setattr(kernels, "by_pass", timed)
    monkeypatch.setattr(kernels, "copy", lambda: 1.0)
    monkeypatch.setattr(kernels, "_references", {})

    def ratio(name):
        found = kernels.measure("nag_update", name, (64, 96, "float32"))
        return found["implementations"][name]["forward"]["vs_reference"]

    assert [ratio("reference"), ratio("xla"), ratio("mosaic_gpu")] == [1, 2, 3] and len(calls) == 3
    kernels._references.clear()
    assert ratio("xla") == 4 / 5 and calls[3:] == ["xla", "reference"]


def test_torch_may_compile_for_longer_than_a_kernel_may_hang(monkeypatch):
    gpu = types.SimpleNamespace(devices=lambda: [types.SimpleNamespace(platform="gpu")])
    monkeypatch.setattr(kernels, "jax", gpu)
    monkeypatch.setattr(kernels, "importlib", types.SimpleNamespace(util=types.SimpleNamespace(find_spec=bool)))
    limits = {bool(case.name.get("peers")): case.limit for case in kernels.cases(Options(False, None, 0.0))}
    assert limits == {False: None, True: 120.0} and worker.PARTS["kernels"][1] < 60.0


def test_a_step_is_set_beside_its_base_of_the_same_process(monkeypatch):
    """A process that goes on behind another one measures the base again, once; one that fails has its error in its own
    case."""
    measured_here = []

    def measure(size, scheme, **model):
        measured_here.append(scheme)
        if scheme == "plain" and model["remat"] == "none":
            raise MemoryError
        return {"milliseconds": 100.0 + len(scheme), "flops_per_step": 1.0}

    monkeypatch.setattr(steps, "measure", functools.cache(measure))
    cases = {tuple(case.name.values()): case.measure for case in steps.cases(Options(False, None, 0.0))}
    assert cases["350M", "nag", "auto", "block"]()["vs_base"]["milliseconds"] == 103 / 105
    assert cases["350M", "review", "auto", "block"]()["vs_base"]["milliseconds"] == 106 / 105
    assert cases["350M", "plain", "auto", "block"]()["vs_base"]["milliseconds"] == 1.0
    assert measured_here == ["nag", "plain", "review"]
    for scheme in ("nag", "lns"):
        assert cases["350M", scheme, "auto", "none"]()["vs_base"] is None
    assert measured_here[3:] == ["nag", "plain", "lns"]
    order = [(case.name["scheme"], case.name["rate"]) for case in steps.routed_cases(Options(False, None, 0.0))]
    assert order[:4] == [("nag", 0.0), ("nag", 0.5), ("nag", 0.25), ("plain", 0.0)]


def test_what_a_small_device_has_no_memory_for_is_left_out(monkeypatch):
    monkeypatch.setattr(steps, "device_bytes", lambda: 15.75 * 2**30)
    for cases in (steps.cases, steps.routed_cases):
        assert {case.name["size"] for case in cases(Options(False, None, 0.0))} == {"350M"}


def test_nothing_is_measured_where_jax_sees_no_accelerator(tmp_path, capfd):
    folders = ["--out", str(tmp_path), "--scratch", str(tmp_path / "scratch")]
    with pytest.raises(SystemExit) as ended:
        device.main(["--part", "values", "--part", "steps", *folders])
    assert ended.value.code == 1
    said = capfd.readouterr().out
    assert said.startswith("values: jax sees no accelerator, only cpu") and "steps" not in said
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.parametrize("part, begun", [("steps", 0), ("training", 1)])
def test_a_case_that_the_part_s_end_cut_off_did_not_hang(part, begun, tmp_path, monkeypatch):
    """A training ends by itself; of the others a case that hangs does."""

    written = Rows(part, tmp_path, 0.0)
    rows.append(written.path, {"origin": written.origin})

    def run(command, env, timeout):
        rows.append(tmp_path / f"{part}.jsonl", {"case": {"case": "a"}, "begun": True})
        raise subprocess.TimeoutExpired(command, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(device.subprocess, "run", run)
        assert device.main(["--part", part, "--out", str(tmp_path), "--scratch", str(tmp_path)]) == 1
    assert Rows(part, tmp_path, 0.0)._known()[1].total() == begun


def test_of_a_folder_for_wheels_only_older_wheels_are_replaced(tmp_path):
    out, made = tmp_path / "out", tmp_path / "made"
    made.mkdir()
    (made / "grain-2.whl").write_text("new")
    wheels.replace(out, made)
    for name in ("grain-1.whl", "COMMIT", "thesis.tex"):
        (out / name).write_text("old")
    (out / "more").mkdir()
    wheels.replace(out, made)
    assert {path.name for path in out.iterdir()} == {"grain-2.whl", "thesis.tex", "more"}


def test_the_commands_for_a_bare_machine_are_of_known_parts_and_leave_a_minute(tmp_path):
    """Run with a Python that only says what it was asked for, and where each part has cases left. The first command
    measures nothing where the check fails."""
    (tmp_path / "python3").write_text('#!/bin/sh\necho "$@" >> "$ASKED"\n[ "$1" = -m ] && exit $CHECK\nexit 1\n')
    (tmp_path / "benchmarks").mkdir()
    (tmp_path / ".wheels").mkdir()
    (tmp_path / ".wheels" / "COMMIT").write_text("abc+def\n")
    (tmp_path / "earlier").mkdir()
    (tmp_path / "earlier" / "values.jsonl").write_text("{}\n")
    script = tmp_path / "benchmarks" / "bare_machine.sh"
    text = (device.ROOT / "benchmarks" / "bare_machine.sh").read_text()
    script.write_text(text.replace("python3 -m pip", "true"))
    (tmp_path / "python3").chmod(0o755)

    def asked(*given, check="0"):
        said = tmp_path / "asked"
        said.write_text("")
        env = os.environ | {
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "ASKED": str(said),
            "CHECK": check,
            "NAGJAX_ROWS": str(tmp_path / "kept"),
        }
        code = subprocess.run(["bash", script, *given], env=env).returncode
        lines = [line.split() for line in said.read_text().splitlines()]
        parts = [line for line in lines if line[0] != "-m"]
        minutes = {line[line.index("--part") + 1]: float(line[line.index("--minutes") + 1]) for line in parts}
        return code, [line for line in lines if line[0] == "-m"], minutes

    known = []
    for number in "123":
        code, begun, minutes = asked(number, tmp_path / "out", tmp_path / "earlier")
        assert code == 0 and begun == [["-m", "benchmarks.parts.check"]] * (number == "1")
        assert 6.5 <= sum(minutes.values()) <= 7.3
        less = asked(number, tmp_path / "out", "", "4.15")[2]
        assert less == pytest.approx({part: own / 2 for part, own in minutes.items()})
        known += minutes
    assert sorted([*known, "experts"]) == sorted(PARTS) and (tmp_path / "out" / "values.jsonl").exists()
    assert asked("2", tmp_path / "next")[0] == 0 and (tmp_path / "next" / "values.jsonl").exists()
    assert asked("1", tmp_path / "out", check="1") == (1, [["-m", "benchmarks.parts.check"]], {})
    assert asked("4", tmp_path / "out")[0] == 2
