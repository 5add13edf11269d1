"""A sweep plans what it is told, trains each run once, whoever does it, and goes on after one that breaks down."""

import json
import math
import os
import shutil
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from nagjax import sweep
from nagjax.cli import main
from nagjax.errors import Preempted, UserError
from nagjax.processes import in_processes
from nagjax.runs.lock import WriterLock
from nagjax.sweep import Varied, check, check_all, plan, results, table, taken, work
from nagjax.train.checkpoint.manifest import write_facts

TINY = {"depth": 1, "width": 16, "context": 16, "batch": 8, "steps": 2, "eval_every": 2, "eval_batches": 1}
TINY |= {"scheme": "plain", "mesh.data": 1}


def test_a_file_of_options_is_known_by_its_name(tmp_path, capsys):
    """As for the other commands that take one."""
    (tmp_path / "run.toml").write_text("depth: 2\n")
    assert main(["sweep", str(tmp_path / "run.toml"), "--out", str(tmp_path / "out"), "--vary", "lr=0.1"]) == 2
    assert "run.toml': a file of options ends in .yaml or .yml" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A finished run of `TINY`."""
    out = tmp_path_factory.mktemp("trained")
    work(plan(TINY, []), out, print)
    return out / "run"


def as_if_trained(trained, trial, out):
    """The finished run as that of a trial which differs in its learning rate alone."""
    folder = shutil.copytree(trained, out / trial.name)
    config = json.loads((folder / "config.json").read_text())
    config["optimizer"]["lr"] = trial.varied["lr"]
    (folder / "config.json").write_text(json.dumps(config))


def test_a_grid_has_every_combination():
    trials = plan({"depth": 4, "lr": 1e-4}, ["lr=1e-3,0.002", "--scheme=plain,nag", "mod.rate=[0.25],[0.5]"])
    assert len(trials) == 8 and len({trial.name for trial in trials}) == 8
    assert trials[0].name == "lr=0.001,scheme=plain,mod.rate=_0.25_"
    assert trials[0].varied == {"lr": 0.001, "scheme": "plain", "mod.rate": [0.25]}
    assert {(t.options.name, t.options.parts["optimizer"].lr, t.options.model.mod.rate) for t in trials} == {
        (scheme, lr, (rate,)) for scheme in ("plain", "nag") for lr in (0.001, 0.002) for rate in (0.25, 0.5)
    }
    assert all(trial.options.model.depth == 4 for trial in trials)
    (alone,) = plan({"depth": 4}, [])
    assert alone.name == "run" and alone.options.model.depth == 4


def test_a_preset_that_is_varied_stands_for_the_sizes():
    small, large = plan({"depth": 3, "width": 16}, ["preset=1M,20M"])
    assert small.options.model.depth > 3 and large.options.model.width > small.options.model.width > 16


def test_draws_are_the_same_however_many_there_are():
    vary = ["lr=1e-4..1e-1", "depth=2..8", "scheme=plain,nag"]
    many, few = plan({}, vary, draws=200, seed=3), plan({}, vary, draws=5, seed=3)
    assert [trial.varied for trial in many[:5]] == [trial.varied for trial in few]
    assert plan({}, vary, draws=5, seed=4)[0].varied != few[0].varied
    rates = [trial.varied["lr"] for trial in many]
    assert all(1e-4 <= rate <= 1e-1 for rate in rates) and abs(np.mean(np.log10(rates)) + 2.5) < 0.25
    assert {trial.varied["depth"] for trial in many} == {*range(2, 9)}
    assert {trial.varied["scheme"] for trial in many} == {"plain", "nag"}


@pytest.mark.parametrize(
    "vary, there", [(["scheme=plain,nag,lns,plain"], 3), (["depth=2..3", "lr=0.1,0.2"], 4), (["lr=0.1..0.1001"], 2)]
)
@pytest.mark.parametrize("seed", range(5))
def test_draws_differ_and_are_as_many_as_were_asked_for_or_all(vary, there, seed):
    found = [plan({}, vary, draws=count, seed=seed) for count in (1, 2, there, 20)]
    assert [len(trials) for trials in found] == [1, 2, there, there]
    assert all(trials == found[-1][: len(trials)] for trials in found)
    assert len({json.dumps(trial.varied) for trial in found[-1]}) == len({trial.name for trial in found[-1]}) == there


def test_nothing_to_draw():
    with pytest.raises(UserError, match="nothing to draw"):
        plan({}, [], draws=3)


def test_names_that_no_file_system_takes_are_cut(tmp_path):
    trials = plan({}, [f"data.path={'ä' * 200},{'ä' * 199}b", "lr=0.1"])
    for trial in trials:
        (tmp_path / trial.name).mkdir()
        assert trial.name.startswith("data.path=ää")
    assert len([*tmp_path.iterdir()]) == 2


def test_a_shard_that_is_done_does_not_wait_for_another_that_trains(tmp_path, capsys, monkeypatch):
    told = []

    def growing(trials, out):
        told.append({"name": "lr=0.1", "varied": {}, "step": len(told), "finished": False, "loss": None})
        return told[-1:]

    (tmp_path / "one.yaml").write_text("depth: 2\n")
    monkeypatch.setattr(sweep, "results", growing)
    monkeypatch.setattr(sweep, "table", lambda found: "")
    monkeypatch.setattr(sweep, "on_one_text", lambda found, out: True)
    command = ["sweep", str(tmp_path / "one.yaml"), "--out", str(tmp_path / "out"), "--vary", "lr=0.1"]
    assert main([*command, "--shard", "1/2"]) == 0 and len(told) == 2


def test_a_shard_without_runs_has_results_too(tmp_path, capsys):
    (tmp_path / "one.yaml").write_text("depth: 2\n")
    command = ["sweep", str(tmp_path / "one.yaml"), "--out", str(tmp_path / "out"), "--vary", "lr=0.1"]
    assert main([*command, "--shard", "1/2"]) == 0
    assert "1 of 1 runs are not finished: the same command goes on" in capsys.readouterr().out
    assert json.loads((tmp_path / "out" / "sweep.json").read_text()) == []


@pytest.mark.parametrize(
    "vary, message",
    [
        (["lr"], "lr=0.001,0.002"),
        (["=3"], "give an option"),
        (["lr=1e-3..1e-2"], "no grid"),
        (["lr=0.1", "lr=0.2"], "each option once"),
        (["data=a,b", "data.path=c"], "each option once"),
        (["lr=0.1,0.1"], "same name"),
        (["lr=[0.1"], r"vary = 'lr=\[0.1': is not a list of values"),
        (["lr=0.1,,0.2"], "vary = 'lr=0.1,,0.2': is not a list of values"),
        (["leaning_rate=0.1"], "leaning_rate"),
        (["lr=-1"], "lr = -1"),
        (["scheme=1,2"], "scheme = 1"),
    ],
)
def test_what_cannot_be_planned(vary, message):
    with pytest.raises(UserError, match=message):
        plan({}, vary)


def test_runs_that_start_from_another_cannot_vary_what_is_that_ones(trained, tmp_path):
    base = {"start": str(trained), "steps": 2, "batch": 8}
    with pytest.raises(UserError, match="vary = 'scheme=lns and scheme=nag'.*are the same run.*vary something else"):
        check_all(plan(base, ["scheme=lns,nag"]), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    check(plan(base, ["lr=1e-3,2e-3"]), tmp_path / "out")


@pytest.mark.parametrize("text", ["lr=0..1", "lr=2..1", "lr=...1"])
def test_ranges_that_are_none(text):
    with pytest.raises(UserError, match="range|list of values"):
        Varied.parse(text)


def test_a_value_that_was_drawn_is_named_with_its_range():
    with pytest.raises(UserError, match=r"vary = 'depth=2..8.5': [\d.]+ was drawn from it: give a whole number"):
        plan({}, ["depth=2..8.5"], draws=1)


@pytest.mark.parametrize(
    "vary, message",
    [
        ("data=stdlib,nope", "data.path = 'nope'"),
        ("mesh.data=1,99", "mesh = "),
        ("tasks=[],[nope.jsonl]", "tasks = 'nope.jsonl'"),
        ("kernels=auto,mosaic_gpu", "kernels = 'mosaic_gpu'"),
    ],
)
def test_what_one_run_refuses_is_told_and_nothing_is_written(tmp_path, vary, message):
    with pytest.raises(UserError, match=message):
        check_all(plan(TINY, [vary]), tmp_path)
    assert not [*tmp_path.iterdir()]


def test_shards():
    assert [*range(7)][taken("1/3")] == [1, 4]
    for text in ("3/3", "-1/3", "1", "a/b", "0/0"):
        with pytest.raises(UserError, match="shard"):
            taken(text)


def test_runs_are_trained_once_and_one_that_another_process_has_is_left_to_it(tmp_path):
    trials, told = plan(TINY, ["lr=0.01,1e30"]), []
    with WriterLock(tmp_path / trials[0].name, "train"):
        work(trials, tmp_path, told.append)
    assert "another process" in told[0] and "bad" in told[1]  # at such a rate the second step's loss is not finite
    found = results(trials, tmp_path)
    assert [own["finished"] for own in found] == [False]
    work(trials[:1], tmp_path, told.append)
    assert told[-1] == "[1/1] lr=0.01: finished"
    before = len(told)
    work(trials[:1], tmp_path, told.append)
    assert len(told) == before
    write_facts(tmp_path / "lr=0.01" / "checkpoints" / "2", {"evaluated": False})  # stopped before that
    work(trials[:1], tmp_path, told.append)
    assert told[-1] == "[1/1] lr=0.01: finished" and len(told) == before + 1
    best, other = results(trials, tmp_path)
    assert best["finished"] and math.isfinite(best["loss"]) and best["varied"] == {"lr": 0.01}
    assert not other["finished"]


def test_the_best_has_the_fewest_bits_per_byte(trained, tmp_path):
    """Not the lowest loss per token: runs of another tokenizer have other tokens."""
    trials = plan(TINY, ["lr=0.01,0.02"])
    for trial, loss, bits in zip(trials, (3.0, 7.0), (4.2, 3.6), strict=True):
        as_if_trained(trained, trial, tmp_path)
        log = tmp_path / trial.name / "metrics.jsonl"
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        lines = [line | {"loss": loss, "bits_per_byte": bits} if line["kind"] == "eval" else line for line in lines]
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = results(trials, tmp_path)
    assert [own["varied"] for own in found] == [{"lr": 0.02}, {"lr": 0.01}]
    assert [(own["loss"], own["bits_per_byte"]) for own in found] == [(7.0, 3.6), (3.0, 4.2)]
    assert table(found).splitlines() == [
        "      loss bits/byte  run",
        "    7.0000    3.6000  lr=0.02",
        "    3.0000    4.2000  lr=0.01",
    ]


def test_results_of_another_sweep_are_not_taken_for_this_ones(trained, tmp_path):
    vary = ["lr=1e-4..1e-2"]
    as_if_trained(trained, *plan(TINY, vary, draws=1), tmp_path)
    assert len(results(plan(TINY, vary, draws=1), tmp_path)) == 1
    others = (plan(TINY, vary, draws=1, seed=1), "optimizer.lr"), (plan(TINY | {"width": 32}, vary, draws=1), "width")
    for trials, message in others:
        for use in (check_all, results):
            with pytest.raises(UserError, match=f"draw-000.*{message} was"):
                use(trials, tmp_path)
    (tmp_path / "draw-001").mkdir()
    shutil.copy(tmp_path / "draw-000" / "config.json", tmp_path / "draw-001")  # another process has just begun it
    assert len(results(plan(TINY, vary, draws=2), tmp_path)) == 1


def test_a_process_that_was_killed_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "first_dies.py").write_text(
        "import os, sys\n"
        "sys.stdin.close()\n"
        "os.mkdir('taken') if not os.path.exists('taken') else sys.exit(0)\n"
        "os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="exit code -9"):
        in_processes("first_dies", "x" * 1_000_000, 2)
    (tmp_path / "taken").rmdir()
    with ThreadPoolExecutor(1) as thread, pytest.raises(UserError, match="exit code -9"):  # which handles no signals
        thread.submit(in_processes, "first_dies", "x", 1).result()


def test_all_processes_end_with_the_one_that_started_them(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "waits.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(pathlib.Path(f'{os.getpid()}.ended').touch()))\n"
        "pathlib.Path(f'{os.getpid()}.up').touch()\n"
        "time.sleep(60)\n"
    )
    monkeypatch.chdir(tmp_path)

    def terminate():
        while len([*tmp_path.glob("*.up")]) < 2:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    threading.Thread(target=terminate, daemon=True).start()
    with pytest.raises(Preempted):
        in_processes("waits", {}, 2)
    assert len([*tmp_path.glob("*.ended")]) == 2 and signal.getsignal(signal.SIGTERM) is handler


def test_the_command_in_two_processes(tmp_path, capsys):
    (tmp_path / "tiny.yaml").write_text("\n".join(f"{name}: {value}" for name, value in TINY.items()))
    out = tmp_path / "sweep"
    command = ["sweep", str(tmp_path / "tiny.yaml"), "--vary", "scheme=plain,rezero", "--out", str(out)]
    assert main([*command, "--processes", "2"]) == 0
    found = json.loads((out / "sweep.json").read_text())
    assert {own["name"] for own in found} == {"scheme=plain", "scheme=rezero"} and all(own["finished"] for own in found)
    assert found[0]["bits_per_byte"] <= found[1]["bits_per_byte"]
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2:] == table(found).splitlines()[1:]
    assert main([*command, "--shard", "1/2"]) == 0
    assert "1 of 2 runs" in capsys.readouterr().out
    assert main([*command[:3], "scheme=plain", "--out", str(out)]) == 0
    assert "runs of another sweep in" in capsys.readouterr().out.splitlines()[-3]


def test_what_is_refused_is_told_once_and_before_any_is_trained(tmp_path, capfd):
    (tmp_path / "tiny.yaml").write_text("\n".join(f"{name}: {value}" for name, value in TINY.items()))
    none, out = tmp_path / "none", tmp_path / "sweep"
    command = ["sweep", str(tmp_path / "tiny.yaml"), "--vary", f"data.path=stdlib,{none}", "--out", str(out)]
    for processes in ("1", "2"):
        assert main([*command, "--processes", processes]) == 2
        assert capfd.readouterr().err.count(f"data.path = '{none}': does not exist") == 1
    assert not [*out.glob("*/checkpoints/*")]


def test_runs_on_several_texts_are_told_to_have_no_order(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("foxes", "hens"):
        (tmp_path / f"{name}.txt").write_text(f"the {name} run over it\n" * 99)
        assert main(["data", "prepare", f"{name}.txt", "--out", name]) == 0
    (tmp_path / "tiny.yaml").write_text("\n".join(f"{name}: {value}" for name, value in TINY.items()))
    told = "their order does not say which is better"
    for vary, expected in (("data.path=foxes,hens", True), ("data.path=foxes", False)):
        assert main(["sweep", "tiny.yaml", "--vary", vary, "--out", "sweep"]) == 0
        assert (told in capsys.readouterr().out) == expected
