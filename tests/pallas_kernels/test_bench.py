"""The benchmark runs, on shapes too small to mean anything."""

import functools
import json

import jax.numpy as jnp
import pytest

from pallas_kernels import bench, shapes, timing
from pallas_kernels.ops.nag_update import OP


def test_benchmark_writes_what_it_measured(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(shapes, "BENCH_CPU", ((64, 96, "float32"),))
    measured = timing.timed

    def longer(fn, make, **how):
        """A second pass that noise cannot hide, and that the host takes long to start."""
        second = isinstance(fn, functools.partial)
        return timing.Taken(measured(fn, make, **how).seconds + second, by_host=second)

    monkeypatch.setattr(bench, "timed", longer)
    file = tmp_path / "new" / "figures.json"
    bench.main(["--op", "nag_update", "--repeats", "1", "--json", str(file)])
    result = json.loads(file.read_text())
    assert result["platform"] == "cpu" and result["copy_GB/s"] > 0
    rows = {(r["op"], r["implementation"], r["pass"]): r for r in result["rows"]}
    passes = ("forward", "forward+backward", "backward")
    assert set(rows) == {("nag_update", i, p) for i in ("reference", "xla") for p in passes}
    forward = rows["nag_update", "xla", "forward"]
    moved = OP.implementations["mosaic_tpu"].bytes_moved(64, 96, "float32")
    assert OP.implementations["xla"].bytes_moved is None  # XLA decides
    assert moved == 64 * (3 * 96 * 4 + 3 * 4)
    assert forward["GB/s"] == pytest.approx(moved / forward["us"] / 1e3)
    assert forward["of_copy"] == pytest.approx(forward["GB/s"] / result["copy_GB/s"])
    assert all(rows["nag_update", "reference", p]["vs_reference"] == 1 for p in passes)
    assert {p for _, i, p in rows if "host_time" in rows["nag_update", i, p]} == {"forward+backward", "backward"}
    out = capsys.readouterr().out
    assert "nothing here says how fast the kernels are" in out and out.count("(host)") == 4
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--repeats", "0"])
    assert "--repeats 0: give at least 1" in capsys.readouterr().err


def test_an_implementation_that_fails_takes_no_other_with_it(monkeypatch, capsys):
    monkeypatch.setattr(shapes, "BENCH_CPU", ((64, 96, "float32"),))
    programs = bench._programs

    def failing(op, implementation, of):
        if implementation == "xla":
            raise RuntimeError("no\nsuch kernel")
        return programs(op, implementation, of)

    monkeypatch.setattr(bench, "_programs", failing)
    found = list(bench.bench("nag_update", (64, 96, "float32"), rotate=0, repeats=1))
    assert {row["implementation"] for row in found if "us" in row} == {"reference"}
    assert [row["error"] for row in found if "error" in row] == ["RuntimeError: no such kernel"]
    bench.main(["--op", "nag_update", "--repeats", "1"])
    assert "xla failed: RuntimeError: no such kernel" in capsys.readouterr().out


@pytest.mark.parametrize("visited, compiled", [(timing.PROGRAM_BYTES, 1), (0, 2)])
def test_short_programs_are_made_longer_than_it_takes_to_start_them(visited, compiled, monkeypatch):
    """By the bytes that they visit, before anything is compiled; and by their time, where that is too short still."""
    monkeypatch.setattr(timing, "PROGRAM_SECONDS", 10.0)
    monkeypatch.setattr(timing, "PROGRAM_BYTES", visited)
    calls = []
    taken = timing.timed(lambda x: calls.append(1) or -x, lambda key: (jnp.ones(8),), rotate=1, repeats=1)
    # For the shapes, perhaps for a first program, and for the one that is timed.
    assert taken.seconds > 0 and len(calls) == compiled + timing.MOST_CALLS


def test_gradients_that_fail_leave_the_forward_pass(monkeypatch, capsys):
    def both(*args):
        raise RuntimeError("no gradient")

    monkeypatch.setattr(bench, "_one_after_the_other", both)
    found = list(bench.bench("nag_update", (64, 96, "float32"), rotate=0, repeats=1))
    assert {row["pass"] for row in found if "us" in row} == {"forward"}
    assert [row["error"] for row in found if "error" in row] == ["RuntimeError: no gradient"] * 2
