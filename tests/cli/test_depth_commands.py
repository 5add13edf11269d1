"""Mixture-of-Depths from the command line, on tiny models."""

import json
import re
import shutil

import numpy as np
import pytest

import nagjax
from nagjax.cli import main
from nagjax.measure.routing_times import told
from nagjax.runs.facts import model_costs
from nagjax.runs.log import load_run
from nagjax.train.checkpoint.store import Checkpoints
from tests.tolerance import close_to

SHAPE = "--depth 3 --width 16 --context 32 --batch 8 --steps 12 --eval-every 12 --eval-batches 2 --mesh.data 1".split()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A dense NAG run, and one routed at half of the tokens."""
    out = tmp_path_factory.mktemp("depth")
    assert main(["train", *SHAPE, "--out", str(out / "dense")]) == 0
    assert main(["train", *SHAPE, "--mod.rate", "0.5", "--out", str(out / "routed")]) == 0
    return out


def printed(capsys, *args) -> str:
    capsys.readouterr()
    assert main([str(a) for a in args]) == 0
    return capsys.readouterr().out


def test_a_routed_run_records_what_it_skips(runs):
    info = json.loads((runs / "routed" / "info.json").read_text())
    dense = json.loads((runs / "dense" / "info.json").read_text())
    assert info["mod_rate"]["total"] == info["mod_rate"]["attention"] == 0.5 and dense["mod_rate"]["total"] == 0.0
    assert info["parameters"] == dense["parameters"]
    assert info["executed_parameters_per_token"] < dense["executed_parameters_per_token"]
    assert info["train_flops_per_token"] < 0.8 * dense["train_flops_per_token"]
    lines = [json.loads(line) for line in (runs / "routed" / "metrics.jsonl").read_text().splitlines()]
    last = [line for line in lines if line["kind"] == "eval"][-1]
    assert last["mod_rate"] == pytest.approx(0.5)
    depth = [line for line in lines if line["kind"] == "depth"][-1]
    assert len(depth["executed"]) == len(depth["agreement"]) == len(depth["causal_executed"]) == 6
    assert last["causal_mod_rate"] == pytest.approx(1 - sum(depth["causal_executed"]) / 6)
    assert last["causal_loss"] != last["loss"]


def test_a_routed_run_is_judged_by_its_causal_decider(runs, capsys):
    """This holds for the log's reader, for `eval` of the last checkpoint, and for the score in the checkpoint."""
    lines = [json.loads(line) for line in (runs / "routed" / "metrics.jsonl").read_text().splitlines()]
    line = [line for line in lines if line["kind"] == "eval"][-1]
    run = load_run(runs / "routed")
    assert run.last_eval.loss == line["causal_loss"] and run.evals.top_k_loss[-1] == line["loss"]
    assert run.last_eval.bits_per_byte == line["causal_bits_per_byte"] and not run.looks_ahead
    scores = json.loads(printed(capsys, "eval", runs / "routed", "--batches", 2, "--as-json"))
    assert scores["causal_loss"] == pytest.approx(run.last_eval.loss, rel=1e-5)
    assert Checkpoints(runs / "routed" / "checkpoints").facts(12)["score"] == line["causal_loss"]


def test_eval_tells_both_rules(runs, capsys):
    scores = json.loads(printed(capsys, "eval", runs / "routed", "--batches", 2, "--as-json"))
    assert {"causal_loss", "causal_mod_rate", "causal_mod_rate_mlp", "agreement", "mod_rate"} <= set(scores)
    assert len(scores["depth"]["causal_executed"]) == 6 and 0 <= scores["agreement"] <= 1


def test_info_says_what_is_skipped(runs, capsys):
    assert "50.0%  (attention 50.0%, MLP 50.0%)" in printed(capsys, "info", runs / "routed")


def test_a_run_is_opened_on_several_devices(runs, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("nagjax.report.diagnose_report.draw_diagnosis", lambda record: [])
    dense, found, one = runs / "dense", {}, ("--batches", "1")
    for count in (1, 2):
        on = "--devices", count
        found[count] = [json.loads(printed(capsys, "eval", dense, "--as-json", *on))["loss"]]
        healed = ["--blocks", "1", "--heal-steps", "1", "--lr", "1e-3"]
        printed(capsys, "prune", dense, "--out", tmp_path / f"short{count}", *one, *healed, *on)
        found[count] += json.loads((tmp_path / f"short{count}" / "prune.json").read_text())["loss"].values()
    printed(capsys, "diagnose", dense, "--out", tmp_path, *one, "--skip-batches", "1", "--curve-batches", "1", *on)
    printed(capsys, "prune", dense, "--curve", "--out", tmp_path, *one, *on)
    record, curves = (json.loads((tmp_path / name).read_text()) for name in ("diagnosis.json", "curve.json"))
    found[2] += [record["loss"], *(curve["loss"] for curve in curves.values())]
    found[1] += 2 * [found[1][1]]  # of the same batch
    assert found[2] == pytest.approx(found[1], rel=1e-4) and len(found[1]) == 6
    for command in ("eval", "diagnose"):
        assert main([command, str(dense), "--devices", "3"]) == 2
        assert "devices = 3: the run's batches have 8 sequences: give a divisor, such as 2" in capsys.readouterr().err
    assert main(["eval", str(dense), "--devices", "99"]) == 2
    assert "devices = 99: this machine has" in capsys.readouterr().err


def test_a_map_tells_what_the_context_leaves_out(runs, tmp_path, capsys):
    told = printed(capsys, "map", runs / "dense", "--text", "a" * 40, "--out", tmp_path)
    assert "(the first 32 of 40 tokens, all that the context holds)" in told


def test_generate_times_both(runs, capsys):
    out = printed(capsys, "generate", runs / "routed", "--prompt", "a", "--tokens", 4, "--speed")
    assert out.count("tokens/s") == 2
    assert re.search(r" x dense: (\d+% of the FLOPs saved is time saved|no time is saved)$", out, re.M)


def test_calibrate_is_used_by_eval_map_and_diagnose_until_it_is_taken_back(runs, tmp_path, capsys, monkeypatch):
    run = shutil.copytree(runs / "dense", tmp_path / "dense")
    before = json.loads(printed(capsys, "eval", run, "--batches", 2, "--as-json"))
    table = printed(capsys, "calibrate", run, "--rates", "0,0.305,0.6", "--choose", 0.6, "--batches", 2)
    found = json.loads((run / "skip_curve.json").read_text())
    lines = [line for line in table.splitlines() if not line.startswith("rates done:")]  # said where it takes long
    assert len(lines) == 7 and "rate 0.6 is used" in table and found["chosen"] == 0.6
    assert [line[2:7].strip() for line in lines[-4:-1]] == ["0.00", "0.305", "0.60"]
    assert found["dense"]["loss"] == pytest.approx(before["loss"], rel=1e-4)
    one, two = found["points"]
    assert one["threshold"] < two["threshold"] and one["flops"] > two["flops"]
    assert one["flops"] < 1.1 * found["dense"]["flops"] and len(two["capacities"]) == 6
    for point in (one, two):
        assert point["mod_rate"] == pytest.approx(point["rate"], abs=0.15)
        for way in ("influence", "late"):
            assert abs(point[f"{way}_flops"] - point["flops"]) < 0.25 * found["dense"]["flops"]
        assert point["late_blocks"] == [1, 2, 3][3 - len(point["influence_blocks"]) :]
        assert all(np.isfinite(point[f"{way}_loss"]) for way in ("tokens", "random", "influence", "late"))
    assert json.loads((run / "calibration.json").read_text())["step"] == 12
    assert "opened at the calibrated rate 0.6" in printed(capsys, "info", run)
    record = json.loads((run / "calibration.json").read_text())
    (run / "calibration.json").write_text(json.dumps(record | {"step": 6}))
    assert "calibrated at step 6 and is at step 12: calibrate it again" in printed(capsys, "info", run)
    (run / "calibration.json").write_text(json.dumps(record))
    assert "skips by angle at the calibrated rate 0.6" in repr(nagjax.load(run))
    after = json.loads(printed(capsys, "eval", run, "--batches", 2, "--as-json"))
    assert after["mod_rate"] == pytest.approx(two["mod_rate"], abs=1e-6)
    assert after["loss"] == close_to(two["loss"], terms=64, chain=24)
    assert "skipped" in printed(capsys, "map", run, "--text", "def f(x): return x")
    monkeypatch.setattr("nagjax.report.diagnose_report.draw_diagnosis", lambda record: [])
    printed(capsys, "diagnose", run, "--batches", 1, "--skip-batches", 1, "--curve-batches", 1)
    assert "Inside NAG, skipping by angle at the calibrated rate 0.6, 3 blocks" in (run / "diagnosis.html").read_text()
    drawn = json.loads((run / "map.json").read_text())
    assert len(drawn["ran"]) == 6 and len(drawn["ran"][0]) == len(drawn["tokens"]) == 18
    assert all((ran == 1) or degrees == 0 for r, d in zip(drawn["ran"], drawn["degrees"], strict=True)
               for ran, degrees in zip(r, d, strict=True))  # fmt: skip
    assert (run / "map.png").read_bytes().startswith(b"\x89PNG") and (run / "skip_curve.png").exists()
    printed(capsys, "calibrate", run, "--rates", "0,0.3", "--choose", 0, "--batches", 2)
    assert not (run / "calibration.json").exists()
    assert "calibrated" not in printed(capsys, "info", run) + repr(nagjax.load(run))
    assert json.loads(printed(capsys, "eval", run, "--batches", 2, "--as-json"))["loss"] == before["loss"]


def test_the_map_stands_in_the_report(runs, tmp_path, capsys):
    printed(capsys, "map", runs / "routed", "--text", "for i in range(3):", "--top-k")
    printed(capsys, "compare", runs / "dense", runs / "routed", "--out", tmp_path / "report")
    assert (tmp_path / "report" / "figures" / "map-1.png").exists()
    page = (tmp_path / "report" / "report.md").read_text()
    assert "which sublayers each token of a text went through" in page and "50.0%" in page


@pytest.mark.parametrize("backend, by", [("cpu", "XLA's count"), ("gpu", "by formula")])
def test_bench_mod_prints_time_saved_over_flops_saved(tmp_path, capsys, monkeypatch, backend, by):
    """That XLA counts the FLOPs which are taken here: tests/mod/test_costs.py. On GPUs it counts few of them."""
    counted = {"cpu": lambda bench, mod: model_costs(bench.blueprint(mod)).train, "gpu": None}[backend]
    monkeypatch.setattr("nagjax.measure.routing_times.compiled_flops", counted)
    monkeypatch.setattr("nagjax.measure.routing_times.on_gpu", lambda: backend == "gpu")
    small = "--scheme plain --depth 2 --width 32 --context 64 --batch 8 --rounds 2 --out".split()
    out = printed(capsys, "bench", "mod", *small, tmp_path / "mod.json")
    result = json.loads((tmp_path / "mod.json").read_text())["results"]
    assert told(result) in out and out.count(f"FLOPs per step ({by})") == 2
    saved = (1 - result["time_ratio"]) / (1 - result["flops_ratio"])
    assert result["time_saved_over_flops_saved"] == pytest.approx(saved) and 0.4 < result["flops_ratio"] < 0.9
    assert result["flops_ratio"] == pytest.approx(result["closed_form_ratio"])


@pytest.mark.parametrize(
    "args, message",
    [
        ("calibrate {routed}", "thresholds of its own"),
        ("calibrate {dense} --rates 0,1.5", "[0, 1)"),
        ("calibrate {dense} --rates a,b", "separated by commas"),
        ("calibrate {dense} --rates 0.1 --choose 0.3", "add it to --rates"),
        ("calibrate {dense} --rates 0.3 --choose 0.3 --rise 0.1", "chosen by --choose"),
        ("calibrate {dense}/nowhere", "no such folder"),
        ("calibrate {dense}/checkpoints", "no config.json in it"),
        ("map {dense}", "either --text or --file"),
        ("map {dense} --file /nowhere", "cannot be read"),
        ("map {dense} --text ab --top-k", "top_k = True: the run has no Mixture-of-Depths"),
        ("map {dense} --text ab --out /dev/null", "out = '/dev/null'"),
        ("prune {dense} --curve --out /dev/null", "out = '/dev/null'"),
        ("prune {dense} {dense} --curve --out x", "two others side by side"),
        ("diagnose {dense} --out /dev/null", "out = '/dev/null'"),
        ("eval {dense} --data nothere", "data = 'nothere'"),
        ("train --data.path nothere", "data.path = 'nothere': does not exist"),
        ("train --data.mix nothere=1 stdlib=1", "data.mix = 'nothere': does not exist"),
        ("train --mod.rate 1.0", "at least 0 and below 1"),
        ("train --scheme plain --mod.rate 0.5 --mod.router nag", "the router linear"),
        ("bench mod --rate 0", "error: rate = 0"),
        ("bench mod --phase prefill --steps 4", "steps = 4: a round of --phase prefill reads every prompt once"),
        ("bench mod --batch 8 --router foo", "error: router = 'foo'"),
        ("bench mod --batch 8 --scheme plain --router nag", "error: router = 'nag'"),
        ("bench mod --phase decode --kv foo", "error: kv = 'foo'"),
        ("demo --schemes plain foo", "error: schemes = 'foo'"),
        ("demo --schemes plain --out {dense}/demo --data nothere", "error: data = 'nothere'"),
    ],
)
def test_bad_input_is_one_line(runs, capsys, args, message):
    capsys.readouterr()
    assert main(args.format(dense=runs / "dense", routed=runs / "routed").split()) == 2
    *before, error = capsys.readouterr().err.splitlines()
    assert message in error and error.startswith("nagjax: error: ") and len(before) <= 2


def test_a_damaged_calibration_is_named(runs, tmp_path, capsys):
    run = shutil.copytree(runs / "dense", tmp_path / "dense")
    (run / "calibration.json").write_text('{"rate": 0.5}')
    assert main(["eval", str(run)]) == 2
    assert "calibration.json" in capsys.readouterr().err


@pytest.mark.parametrize("step, fine", [(12, True), (None, True), (8, False)])
def test_a_threshold_of_other_weights_is_refused(runs, tmp_path, capsys, step, fine):
    """The run has been trained on since it was calibrated."""
    run = shutil.copytree(runs / "dense", tmp_path / "dense")
    noted = {} if step is None else {"step": step}
    (run / "calibration.json").write_text(json.dumps({"rate": 0.5, "threshold": 0.1} | noted))
    assert main(["eval", str(run), "--batches", "1"]) == (0 if fine else 2)
    error = capsys.readouterr().err
    assert fine or ("is of step 8, and the run is at step 12: remove it, or calibrate again" in error)
