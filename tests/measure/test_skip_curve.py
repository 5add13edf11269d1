"""The controls of calibrated skipping leave out what they are named after."""

import dataclasses
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.cli import main
from nagjax.errors import UserError
from nagjax.layers.config import BlockConfig, MoEConfig
from nagjax.measure.cuts import Cutter
from nagjax.measure.skip_curve import CLOSE, Sweep, _check, _choose
from nagjax.runs.lock import WriterLock
from nagjax.runs.names import CALIBRATION
from nagjax.runs.opening import open_run

DEPTH = 3


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    out = tmp_path_factory.mktemp("curve") / "dense"
    shape = f"--depth {DEPTH} --width 16 --context 32 --batch 8 --steps 12 --eval-every 12 --eval-batches 2"
    assert main(["train", *shape.split(), "--out", str(out)]) == 0
    return open_run(out, calibrated=False)


def test_a_saved_rate_is_taken_back_without_a_sweep(run, tmp_path, monkeypatch, capsys):
    folder, command = tmp_path / "run", ["calibrate", str(tmp_path / "run"), "--choose", "0"]
    shutil.copytree(run.folder, folder)
    (folder / CALIBRATION).write_text("{}")
    monkeypatch.setattr("nagjax.measure.skip_curve.open_run", None)  # nothing is measured
    with WriterLock(folder, "test"):
        assert main(command) == 2 and (folder / CALIBRATION).exists()
    for measured in ("--batches", "--rise"):
        assert main([*command, measured, "1"]) == 2 and (folder / CALIBRATION).exists()
    for _ in range(2):
        assert main(command) == 0 and not (folder / CALIBRATION).exists()
        assert "the dense model is used" in capsys.readouterr().out
    assert main(["calibrate", str(tmp_path / "absent"), "--choose", "0"]) == 2 and not (tmp_path / "absent").exists()


@pytest.mark.parametrize("rates", ["0", "1", "-0.1,0.5"])
def test_rates_that_skip_nothing_or_all_are_refused_before_a_saved_one_is_taken_back(run, tmp_path, rates, capsys):
    folder = shutil.copytree(run.folder, tmp_path / "run")
    (folder / CALIBRATION).write_text("{}")
    assert main(["calibrate", str(folder), "--choose", "0", f"--rates={rates}"]) == 2
    assert "rates = [" in capsys.readouterr().err and (folder / CALIBRATION).exists()


@pytest.mark.parametrize(
    "field, model",
    [("block.cca", {"block": BlockConfig(cca=True, head_width=8)}), ("moe.skips", {"moe": MoEConfig(4, 2, skips=1)})],
)
def test_a_model_whose_tokens_must_run_every_sublayer_is_refused(run, field, model):
    config = dataclasses.replace(run.config, model=dataclasses.replace(run.config.model, **model))
    other = dataclasses.replace(run, blueprint=dataclasses.replace(run.blueprint, config=config))
    with pytest.raises(UserError, match=f"run = .*was trained with {field}: .* cannot be calibrated"):
        _check(other, (0.5,), None)


def test_the_highest_rate_within_the_rise_is_chosen():
    points, dense = [{"rate": 0.1, "loss": 2.01}, {"rate": 0.3, "loss": 2.02}, {"rate": 0.5, "loss": 2.5}], {"loss": 2}
    assert _choose(points, dense, None, 0.025) == 0.3 and _choose(points, dense, None, 0.015) == 0.1
    assert _choose(points, dense, None, 0.005) == 0.0 and _choose(points, dense, 0.5, 0.005) == 0.5


def test_a_threshold_skips_the_share_that_was_asked_for(run):
    swept = Sweep(run, batches=1, search_batches=2)
    for rate in (0.2, 0.4):
        assert swept._skipped(swept.threshold(rate)) == pytest.approx(rate, abs=CLOSE)


def test_every_control_leaves_out_what_it_says(run, monkeypatch):
    scored = []

    def score(self, evaluator, cuts, text):
        scores, executed = own(self, evaluator, cuts, text)
        if text is self.held_out:
            scored.append((scores["loss"], executed))
        return scores, executed

    own = Sweep._score
    monkeypatch.setattr(Sweep, "_score", score)
    swept = Sweep(run, batches=2, search_batches=1)
    point = swept.point(0.4)
    ran = dict(scored)
    by_angle, tokens, chance, influence, late = (
        ran[point[of]] for of in ("loss", "tokens_loss", "random_loss", "influence_loss", "late_loss")
    )
    assert by_angle.ravel() == pytest.approx(point["executed"]) and np.ptp(by_angle) > 0.3
    drawn = 5 * 0.5 / np.sqrt(2 * 8 * 32)  # five standard deviations of the share of so many tokens at most
    np.testing.assert_allclose(tokens, by_angle, atol=drawn)
    np.testing.assert_allclose(chance, np.tile(by_angle.mean(axis=0), (DEPTH, 1)), atol=drawn)
    assert np.abs(chance - by_angle).max() > drawn
    for way, executed in (("influence", influence), ("late", late)):
        stays = np.isin(np.arange(1, DEPTH + 1), point[f"{way}_blocks"], invert=True)
        np.testing.assert_array_equal(executed, np.repeat(stays[:, None], 2, axis=1))
    without = Cutter(run)
    gone = [block - 1 for block in point["influence_blocks"]]
    cosine, _ = without.measure(swept.text)
    kept = np.setdiff1d(np.arange(DEPTH), gone)
    turns = 1 - np.diagonal(cosine, 1)
    assert gone and turns[gone].max() <= turns[kept].min()
    assert point["influence_loss"] == pytest.approx(without.loss(swept.held_out, gone), rel=1e-4)


def test_a_model_whose_loss_is_not_finite_is_refused(run):
    """No threshold skips tokens whose angles are not numbers: the search for one would not end."""
    broken = dataclasses.replace(run, params=jax.tree.map(lambda leaf: jnp.nan * leaf, run.params))
    with pytest.raises(UserError, match="run = .*its loss is nan"):
        Sweep(broken, batches=1, search_batches=1).dense()
