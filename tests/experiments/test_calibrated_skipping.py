import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.calibrated_skipping import CONTROLS, RATES, SIZES, added, curves, plan, summarise
from experiments.harness.jobs import Record
from experiments.harness.skipping import CUBIC, LINEAR, RUN, Point, Skipping, on_curve, on_every_curve
from experiments.harness.verdicts import Gap
from nagjax.errors import UserError
from nagjax.measure.cuts import Cutter
from nagjax.residual import find_scheme
from nagjax.runs.facts import model_costs
from nagjax.runs.opening import OpenRun
from tests import tiny
from tests.tolerance import close_to

SETTINGS = dataclasses.replace(SIZES["cpu"], seeds=2)
DENSE = 100.0  # forward FLOPs of the planted dense run


def curve(slope, base=3.0, flops=DENSE):
    """Points whose loss rises by `slope` for each share of the FLOPs; half of what is skipped is saved."""
    return [Point(rate, flops * (1 - rate / 2), base + slope * rate / 2, 0.5) for rate in (0.0, *RATES)]


def records(angle, late, seeds=2):
    """Losses that rise with what is skipped: by angle, by the last blocks, and twice that by the others."""
    found = []
    for seed in range(seeds):
        base, tilt = 3.0 + 0.1 * seed, 0.01 * seed
        ways = dict.fromkeys(("tokens", "random", "influence"), 2.0) | {"angle": angle, "late": late}
        nag = {way: curve(slope + tilt, base) for way, slope in ways.items()}
        plain = {way: curve(1.0, base, 50.0) for way in CONTROLS}
        routed = {way: curve(0.2, base + 0.01) for way in ("angle", "own")}
        short = {"scratch": [Point(0.0, 0.75 * DENSE, base + 0.05, 0.5)]}
        for kind, own in (("nag", nag), ("plain", plain), ("routed", routed), ("short", short)):
            labels = {"kind": kind, "blocks": 12, "seed": seed}
            found.append(Record("", labels, {}, {"loss": base, "curves": own}))
    return found


def test_curves_are_read_in_flops():
    points = [Point(0.0, 100.0, 3.0, 0.5), Point(0.5, 50.0, 4.0, 0.4)]
    assert on_curve(points, 75.0) == 3.5 and on_curve(points[::-1], 75.0, "accuracy") == pytest.approx(0.45)
    assert on_curve(points, 120.0) == 3.0 and on_curve(points, 10.0) == 4.0
    assert on_curve([list(point) for point in points], 50.0) == 4.0  # as a result file has them


def test_a_verdict_that_depends_on_the_curve_is_none():
    bent = [Point(0.0, 100.0, 3.0, 0.5), Point(0.1, 90.0, 3.0, 0.5), Point(0.3, 70.0, 4.0, 0.5)]
    assert on_curve(bent, 80.0) == 3.5 and on_curve(bent, 80.0, curve=CUBIC) == pytest.approx(
        3.5 - 20 / 8 * (50 * 0.05 / 30)
    )
    assert on_curve([*bent, bent[0]], 120.0, curve=CUBIC) == 3.0 and on_curve(bent[:1], 90.0, curve=CUBIC) == 3.0
    ahead, behind = ([Gap("", {seed: sign + 0.1 * seed for seed in range(5)})] for sign in (1.0, -1.0))
    assert on_every_curve(lambda curve: ahead) == ("supported", [])
    verdict, (reason,) = on_every_curve(lambda curve: ahead if curve == LINEAR else behind)
    assert verdict == "undecided" and "supported by a linear one, not supported by a monotone cubic one" in reason


def test_what_is_lost_is_compared_at_the_angles_share_of_the_flops():
    found = records(angle=0.5, late=1.0)
    assert added(found, "nag", "angle", 0.2) == pytest.approx({0: 0.05, 1: 0.051})  # at 90% of the FLOPs
    assert added(found, "plain", "random", 0.2) == pytest.approx({0: 0.1, 1: 0.1})  # at 90% of plain's own
    assert added(found, "routed", "own", 0.2) == pytest.approx({0: 0.03, 1: 0.03})
    # 10% of the FLOPs less on the line from the dense run to the short one, which has 25% less.
    assert added(found, "short", "scratch", 0.2) == pytest.approx({0: 0.02, 1: 0.02})
    assert [len(points) for points in curves(found, "short", "scratch").values()] == [2, 2]


def test_verdicts():
    won = summarise(SETTINGS, records(angle=0.5, late=1.0))
    assert won.verdict == "supported" and "20% skipped by angle, 90% of the FLOPs: loss +0.0505" in won.measured
    assert "the last blocks +0.0500 [0.0500, 0.0500]" in won.measured
    assert [(row["run"], row["runs"]) for row in won.table] == 5 * [("nag", 2)] + 3 * [("plain", 2)] + 2 * [
        ("routed", 2)
    ] + [("short", 2)]
    # It beats random skipping, and loses to the last blocks: told, and not supported.
    lost = summarise(SETTINGS, records(angle=0.5, late=0.3))
    assert lost.verdict == "not supported" and "at random +0.1500" in lost.measured
    assert "the last blocks -0.0200" in lost.measured
    assert summarise(SETTINGS, records(angle=0.5, late=1.0, seeds=1)).verdict == "undecided"  # one run has no interval
    broken = records(angle=0.5, late=1.0)
    broken.append(Record("", {"kind": "nag", "blocks": 12, "seed": 2}, {}, {"loss": None, "diverged": "loss"}))
    broken = summarise(SETTINGS, broken)  # on two seeds of three, and which these are the models themselves chose
    assert broken.verdict == "undecided" and "diverged" in broken.headline


def test_every_run_gets_the_training_flops_of_the_dense_one():
    jobs = plan(SIZES["cpu"])
    steps = {job.labels["kind"]: job.run_config.train.steps for job in jobs}
    assert len(jobs) == 12 and steps["nag"] == SIZES["cpu"].steps < steps["routed"] < steps["short"]
    assert {job.labels["blocks"] for job in jobs} == {12, 9}
    with pytest.raises(UserError, match="with nag"):
        plan(dataclasses.replace(SIZES["cpu"], kinds=("plain",)))


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    blueprint = tiny.blueprint(tiny.run_config(find_scheme("nag")(), depth=2, context=32))
    params = tiny.moved(jax.jit(lambda: blueprint.init_params(0))())
    return OpenRun(tmp_path_factory.mktemp("run"), blueprint, 100, params, {}, None)


def test_skipping_pairs_and_blocks(run):
    text = [tiny.packed_batch(seed, tokens=32) for seed in (0, 1)]
    at_random, by_angle, cutter = Skipping(run, "random"), Skipping(run, "nag"), Cutter(run)
    everything = at_random.without((), text)
    assert everything.loss == close_to(cutter.loss(text), terms=64, chain=24) and everything.skipped == 0
    assert everything.flops == model_costs(run.blueprint).forward
    less = at_random.without([1], text)
    assert less.loss == close_to(cutter.loss(text, [1]), terms=64, chain=24) and less.skipped == 0.5
    assert less.loss != everything.loss and less.flops < everything.flops
    # The score of a token that runs is its update's angle; of one that skips it is paid for.
    scored, ran = by_angle.point(np.full(1, RUN), text)
    assert scored.loss == close_to(everything.loss, terms=64, chain=24) and np.all(ran == 1)
    gates = 2 * 4 * run.params["blocks"]["mlp"]["gate"]["weight"][0].size  # FLOPs of the four sublayers' scores
    assert scored.flops == pytest.approx(everything.flops)
    # Thresholds of a uniform score are rates; of the angle they are searched for, with the sublayers' ratio kept.
    half, ran = at_random.point(np.full(1, 0.5), text)
    assert half.skipped == pytest.approx(0.5, abs=0.05) and np.ptp(ran) < 0.2
    profile = np.array([1.0, 2.0, 1.0, 0.0])
    found = by_angle.factor(profile, 0.4, text)
    point, ran = by_angle.point(found * profile, text)
    assert point.skipped == pytest.approx(0.4, abs=0.02) and ran[1, 1] == 1 and ran[0, 1] < ran[0, 0]
    assert point.flops == pytest.approx(at_random.flops(ran, by_token=True) + gates * point.skipped)
    assert isinstance(point.loss, float) and jnp.isfinite(point.loss)
