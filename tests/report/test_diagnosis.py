"""A diagnosis end to end, on a model in which it is known which blocks do nothing."""

import json
import re

import pytest

from nagjax import cli
from nagjax.report.pruning import prune
from nagjax.report.verdict_depth import depth_verdict


def test_a_diagnosis(run_folder, tmp_path, capsys):
    """Of what an earlier removal has left, whose page has the old numbers too."""
    run = tmp_path / "short"
    prune(run_folder, run, blocks=[1], batches=1)
    before = sorted(p.name for p in run.iterdir())
    small = ["--batches", "1", "--skip-batches", "2", "--curve-batches", "2"]
    cli.run(["diagnose", str(run), "--out", str(tmp_path), *small])
    assert sorted(p.name for p in run.iterdir()) == before
    record = json.loads((tmp_path / "diagnosis.json").read_text())
    assert record["verdict"] in capsys.readouterr().out
    depth = record["depth"]
    assert len(record["sublayers"]["norm"]) == 2 * depth and len(record["angular_distance"]) == depth + 1
    assert record["lens"]["divergence"][-1] == pytest.approx(0, abs=1e-5)
    assert record["cka"][0][0] == pytest.approx(1, rel=1e-4)
    assert all(value > 0 for values in record["gradients"].values() for value in values)
    dead = sum(turn < 0.05 for turn in record["gates"]["turn"])
    assert f"{dead} of {2 * depth} modulators let their sublayer turn" in record["verdict"]
    skips = record["skips"]
    whole = record["curve"]["loss"]
    # The same text as the curve's: what is lost without the last block is told by two programs.
    (last,) = [loss for count, loss, _ in record["curve"]["rules"]["late"] if count == 1]
    assert skips["added_loss"][-1] == pytest.approx(last - whole, abs=2e-3)
    assert skips["loss"] == pytest.approx(whole, abs=1e-4) and abs(record["loss"] - whole) > 1e-3  # of other batches
    assert skips["tokens"] > record["tokens"]
    parts = record["calibration"]["bins"]
    assert sum(share for share, _, _ in parts) == pytest.approx(1, abs=1e-4)
    distance = sum(share * abs(right - sure) for share, sure, right in parts)
    assert record["calibration"]["error"] == pytest.approx(distance, abs=1e-4)
    assert set(record["held_gates"]) == {"mean"} and "Gates held at their mean" in record["verdict"]
    page = (tmp_path / "diagnosis.html").read_text()
    assert not re.search(r"(src|href)=\"(?!data:)", page) and page.count("<figure") >= 15
    assert record["verdict"].split(".")[0] in page
    assert "debiased" in page and "slightly below" in page  # what the values of CKA are
    assert "Blocks count from 1" in page and f"<tr><th>{depth}</th>" in page and "<tr><th>0</th>" not in page
    assert record["kept"] == [0, 2, 3] and "among those that an earlier removal has left" in page
    assert "<th>block</th><th>before the removal</th>" in page and "<tr><th>2</th><td>3</td>" in page


def test_verdicts():
    points = [[0, 2.0, []], [1, 2.01, [3]], [2, 2.5, [2, 3]]]
    skips = {
        "added_loss": [0.5, 0.02, 0.009, -0.001],
        "standard_error": [0.1, 0.02, 0, 0],
        "batches": 3,
        "loss": 2.3,
        "contributing": 1.1,
        "depth_score": 1.2,
    }
    record = {"depth": 4, "loss": 2.0, "skips": skips, "gates": None, "held_gates": None}
    record["calibration"] = {"error": 0.12, "bins": [[0.5, 0.3, 0.2], [0.5, 0.9, 0.76]]}
    record["curve"] = {"loss": 2.0, "rules": {"late": points}}
    told = depth_verdict(record)
    assert (
        "2 of 4 blocks (50%) are used" in told
        and "to a loss of 2.300" in told
        and "(1 of them more than two standard errors above this" in told
    )
    assert "block 1 (+0.50)" in told
    assert "mostly on shallow ones" in told and "Found: 1 block that could go for +0.010 nats per token: 4 " in told
    assert "right on 48.0% of the tokens" in told and "60.0% on average: overconfident" in told
    assert "Gates held" not in told
    sound = skips["added_loss"]
    skips["added_loss"] = [0.5, None, 0.009, -0.001]  # no finite loss without the second
    broken = depth_verdict(record)
    assert "2 of 4 blocks (50%) are used" in broken and "(2 of them more than" in broken and "block 2 (+inf)" in broken
    skips |= {"added_loss": sound, "depth_score": None, "effects": [[0.0, 0.0], [0.0, 0.0]]}
    assert "No block has an effect on a later one." in depth_verdict(record)
    skips["effects"][0][1] = None
    assert "could not be measured" in depth_verdict(record) and "No block has" not in depth_verdict(record)
    record["held_gates"] = {"mean": {"added_loss": None, "standard_error": None}}
    assert "leave no finite loss" in depth_verdict(record)
    skips["depth_score"] = 1.2
    record["curve"]["rules"]["late"] = [points[0], points[2]]
    record["calibration"]["bins"] = [[1.0, 0.3, 0.4]]
    record["held_gates"] = {"mean": {"added_loss": 0.25, "standard_error": None}}
    told = depth_verdict(record)
    assert "No rule finds" in told and "underconfident" in told and "add 0.250 nats per token." in told
