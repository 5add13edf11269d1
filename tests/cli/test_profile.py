"""nagjax profile: every part of the model is found in the trace of a real step, and times add up."""

import contextlib
import re
import types
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.cli import main
from nagjax.measure import profile
from nagjax.measure.profile import OTHER, scope_of, scopes_of


def test_every_part_takes_time(tmp_path, capsys):
    tiny = "--scheme nag --depth 2 --width 32 --context 32 --batch 8 --mod.rate 0.5 --traced 2".split()
    assert main(["profile", *tiny, "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    found = re.findall(r"(\w+) +([\d.]+) ms +([\d.]+)%", printed)
    rows = {name: (float(ms), float(share)) for name, ms, share in found}
    parts = {"embedding", "attention", "mlp", "residual", "routing", "head", "optimizer"}
    assert parts <= set(rows) <= parts | {OTHER}
    assert all(ms > 0 for ms, _ in rows.values())
    assert sum(share for _, share in rows.values()) == pytest.approx(100, abs=0.5)
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_the_innermost_part_counts():
    assert scope_of("jit(step)/transpose(jvp(attention))/while/body/residual/mul") == "residual"
    assert scope_of("jit(step)/jvp(mlp)/dot_general") == "mlp"
    assert scope_of("jit(step)/reduce_sum") == OTHER


def test_loops_are_not_counted_beside_what_is_in_them():
    def loop(x):
        with jax.named_scope("mlp"):
            return jax.lax.scan(lambda x, _: (jnp.tanh(x @ x), None), x, length=3)[0]

    text = jax.jit(loop).lower(jnp.ones((8, 8))).compile().as_text()
    found = scopes_of(text)
    (name,) = re.findall(r"%([\w.]+) = .* while\(", text)
    assert name not in found
    assert "mlp" in found.values()


def test_no_steps_is_an_error(tmp_path, capsys):
    assert main(["profile", "--traced", "0", "--out", str(tmp_path)]) == 2
    assert "traced = 0" in capsys.readouterr().err


ON_CPU, KNOWN, UNKNOWN = ("/host:CPU", 7, "fusion.1"), ("/device:GPU:0", 5, "fusion.1"), ("/device:GPU:0", 5, "other")


@pytest.mark.parametrize("seen, found", [([ON_CPU], 7), ([ON_CPU, KNOWN], 5), ([ON_CPU, UNKNOWN], None)])
def test_what_the_host_did_to_start_an_instruction_is_no_time_of_the_device(monkeypatch, seen, found):
    """Nor where the device's own events do not say which instruction they belong to."""

    def plane(name, nanoseconds, instruction):
        event = types.SimpleNamespace(name="launch", stats=[("hlo_op", instruction)], duration_ns=nanoseconds)
        return types.SimpleNamespace(name=name, lines=[types.SimpleNamespace(events=[event])])

    trace = types.SimpleNamespace(planes=[plane(*one) for one in seen])
    monkeypatch.setattr(profile, "ProfileData", types.SimpleNamespace(from_file=lambda path: trace))
    assert profile.times_by_scope(iter([Path("a.xplane.pb")]), {"fusion.1": "mlp"}) == ({"mlp": found} if found else {})


def test_a_program_without_graphs_is_one_that_the_compiler_knows():
    assert jax.jit(lambda x: x + 1).lower(1.0).compile(profile.WITHOUT_GRAPHS)(1.0) == 2.0


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_times_are_of_one_step_on_one_device(tmp_path, monkeypatch, platform):
    """Two steps on four devices: they wait six seconds for their metrics, and work eight milliseconds in all. On a GPU
    the traced program starts its kernels one by one."""
    now, done = types.SimpleNamespace(seconds=10.0), []
    mesh = types.SimpleNamespace(size=4, devices=np.array([types.SimpleNamespace(platform=platform)]))
    blueprint = types.SimpleNamespace(create=lambda: 0, mesh=mesh)

    class Step:
        def __init__(self, options):
            assert options == (profile.WITHOUT_GRAPHS if platform == "gpu" else None)

        def __call__(self, state, batch):
            done.append(state)
            return state + 1, None

        def as_text(self):
            return ""

    def wait(metrics):
        now.seconds += 6.0

    lowered = types.SimpleNamespace(compile=Step)
    monkeypatch.setattr(profile, "jit_train_step", lambda plan: types.SimpleNamespace(lower=lambda *given: lowered))
    monkeypatch.setattr(profile, "time", types.SimpleNamespace(perf_counter=lambda: now.seconds))
    monkeypatch.setattr(jax, "block_until_ready", wait)
    monkeypatch.setattr(jax.profiler, "trace", lambda folder: contextlib.nullcontext())
    monkeypatch.setattr(profile, "scopes_of", lambda hlo: {})
    monkeypatch.setattr(profile, "times_by_scope", lambda files, scopes: Counter(mlp=6_000_000, head=2_000_000))
    found = profile.trace_steps(blueprint, None, tmp_path, 2)
    assert found.pop("scopes") == pytest.approx({"mlp": 0.75, "head": 0.25})
    assert found == {"steps": 2, "devices": 4, "milliseconds": 3000.0} and done == [0, 1, 2]
