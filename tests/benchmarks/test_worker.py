"""The process of a part ends at once, and says beforehand whether it can measure anything."""

import subprocess
import sys

from benchmarks import device
from benchmarks.parts import check, rows, worker

COMPILING = """
import runpy, sys, time
sys.path.insert(0, ".")
from benchmarks.parts import values
from benchmarks.parts.rows import Case
from pallas_kernels import origin
origin.origin = lambda packages: {}
first = Case({"case": "first"}, lambda made: time.sleep(float(sys.argv[4])) or {}, compile=dict)
then = Case({"case": "then"}, lambda made: {}, compile=lambda: time.sleep(1000))
values.cases = lambda options: [first, then]
runpy.run_module("benchmarks.parts.worker", run_name="__main__")
"""


def test_a_part_does_not_wait_for_what_it_compiles_ahead(tmp_path):
    script = tmp_path / "compiling.py"
    script.write_text(COMPILING)
    command = [sys.executable, str(script), "values", str(tmp_path), str(tmp_path), "0.5", "rehearse"]
    ended = subprocess.run(command, cwd=device.ROOT, capture_output=True, text=True, timeout=120)
    assert ended.returncode == worker.LEFT, ended.stderr
    assert ended.stdout.splitlines()[-1] == "values: 1 cases left"
    assert [row["case"]["case"] for row in rows.measured(tmp_path / "values.jsonl")] == ["first"]


def test_the_check_of_a_machine_names_what_is_there_and_what_is_missing(monkeypatch, capsys):
    assert check.main() == 1
    versions, code, seen, why = capsys.readouterr().out.splitlines()
    assert "jax 0." in versions and "modules to train on" in code and "(cpu)" in seen and "no accelerator" in why
    monkeypatch.setattr(check, "PARTS", {"missing": ("missing.cases", None)})
    monkeypatch.setattr(check.jax, "devices", lambda: [device_of("gpu")])
    assert check.main() == 0, "the other parts are measured"
    assert "benchmarks.parts.missing cannot be imported" in capsys.readouterr().out


def device_of(platform):
    return type("Device", (), {"platform": platform, "device_kind": "NVIDIA H200"})()
