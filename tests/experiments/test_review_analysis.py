"""The paper's means and t values, from the per-run losses released with it."""

from pathlib import Path

import numpy as np
import pytest

from experiments.harness.jobs import Record
from experiments.harness.recipe import load
from experiments.review_scaling import Table, losses
from nagjax.errors import UserError

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "review_residuals_runs.csv"

MEANS = {  # Review, Highway, standard: arXiv:2606.31859
    "60M": (1.6891, 1.6923, 1.6805),
    "150M": (1.5576, 1.5625, 1.5548),
    "320M": (1.5001, 1.5042, 1.5037),
    "590M": (1.4795, 1.4889, 1.4901),
    "1B": (1.4876, 1.5031, 1.5040),
}


def _summary(path: Path, tmp_path: Path):
    metrics = Table("released", {}, str(path)).run(tmp_path)
    records = [Record("released", {}, {}, metrics)]
    recipe = load("review_scaling")
    return losses(records), recipe.summarise(recipe.settings("released"), records)


@pytest.mark.skipif(not REFERENCE.exists(), reason="the released runs are not here")
def test_means_and_t_values_of_the_paper(tmp_path):
    found, summary = _summary(REFERENCE, tmp_path)
    assert list(found) == list(MEANS)
    for size, means in MEANS.items():
        got = [np.mean(list(found[size][variant].values())) for variant in ("review", "highway", "plain")]
        np.testing.assert_allclose(got, means, atol=5.001e-5, err_msg=size)
    rows = {(row["size"], row["variant"]): row for row in summary.table}
    assert [round(rows["590M", variant]["t"], 1) for variant in ("highway", "plain")] == [3.3, 3.7]
    assert max(rows["590M", variant]["p"] for variant in ("highway", "plain")) < 0.05
    np.testing.assert_allclose([rows["1B", variant]["t"] for variant in ("highway", "plain")], [2.3, 2.4], atol=0.06)
    np.testing.assert_allclose([rows["1B", variant]["p"] for variant in ("highway", "plain")], 0.07, atol=0.015)
    assert summary.verdict == "undecided"  # p about 0.07 at the largest size


def test_verdicts_on_made_up_tables(tmp_path):
    path = tmp_path / "runs.csv"
    means = {"review": 1.0, "highway": 1.1, "plain": 1.1}
    rows = [("1B", v, s, base + 0.001 * s) for v, base in means.items() for s in range(5)]

    def verdict():
        lines = [",".join(map(str, row)) for row in rows]
        path.write_text("\n".join(["size,variant,seed,val_loss", *lines]))
        return _summary(path, tmp_path)[1].verdict

    assert verdict() == "supported"
    whole = rows
    rows = [(size, variant, seed + 9 * (variant == "review"), loss) for size, variant, seed, loss in whole]
    assert verdict() == "supported"  # Welch's test needs no pairs
    rows = [("320M", *row[1:]) for row in whole]
    assert verdict() == "undecided" and _summary(path, tmp_path)[1].reasons == ["320M is not among 590M, 1B"]
    rows = [row for row in whole if row[1] != "plain"]
    assert verdict() == "undecided" and _summary(path, tmp_path)[1].reasons == ["without plain"]
    rows += [("1B", "plain", seed, 1.001 + 0.001 * (seed % 3)) for seed in range(5)]
    assert verdict() == "undecided"  # ahead of one baseline, level with the other
    rows = [(size, variant, seed, 2.1 - loss) for size, variant, seed, loss in whole]
    assert verdict() == "not supported"
    rows = [row for row in rows if row[1:3] != ("highway", 4)]
    assert verdict() == "undecided" and _summary(path, tmp_path)[1].reasons == ["4 fresh seeds, 5 needed"]
    path.write_text("size,loss\n1B,2\n")
    with pytest.raises(UserError, match="variant, seed, val_loss"):
        _summary(path, tmp_path)
    with pytest.raises(UserError, match="give a table"):
        _summary(tmp_path / "missing.csv", tmp_path)


def test_to_be_behind_one_of_many_baselines_takes_holm_s_p():
    def records(variant, mean):
        labels = {"size": "tiny", "variant": variant}
        return [Record("", labels | {"seed": s}, {}, {"loss": mean + 0.02 * (s - 3)}) for s in range(1, 6)]

    recipe, level = load("review_scaling"), [f"level {i}" for i in range(5)]
    own = [*records("review", 2.0), *records("better", 1.95)]
    found = recipe.summarise(recipe.settings("smoke"), own)
    assert 0.01 < found.table[1]["p"] < 0.05 and found.verdict == "not supported"
    own += [record for variant in level for record in records(variant, 2.0)]
    assert recipe.summarise(recipe.settings("smoke"), own).verdict == "undecided"


def test_baselines_match_by_their_own_measure():
    recipe = load("review_scaling")
    jobs = {job.name: job for job in recipe.plan(recipe.settings("cpu"))}
    review, wider, longer = (jobs[f"0.6M-{n}-s1"].run_config for n in ("review", "plain-parameters", "plain-flops"))
    assert wider.model.width > review.model.width and wider.train.steps == review.train.steps
    assert longer.model.width == review.model.width and longer.train.steps > review.train.steps
    assert {config.train.seed for config in (review, wider, longer)} == {1}
    assert jobs["0.6M-plain-time-s1"].config() == jobs["0.6M-plain-time-s1"].config()


def test_calibration_errors_are_means_over_the_seeds_that_have_one():
    def record(variant, seed, **metrics):
        return Record(f"{variant}-{seed}", {"size": "tiny", "variant": variant, "seed": seed}, {}, metrics)

    records = [record("review", seed, loss=2.0, calibration_error=0.02 * seed) for seed in (1, 2)]
    records += [record("plain", 1, loss=2.1, calibration_error=0.05), record("plain", 2, diverged="nan", loss=None)]
    recipe = load("review_scaling")
    table = recipe.summarise(recipe.settings("smoke"), records).table
    assert {row["variant"]: row["calibration error"] for row in table} == {"review": 0.03, "plain": 0.05}
