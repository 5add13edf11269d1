import dataclasses
from pathlib import Path

import numpy as np
import pytest

from experiments.harness.jobs import Record
from experiments.harness.recipe import load
from experiments.harness.scaling_law import bootstrap_parameters, drop_highest, fit, profile
from experiments.inverse_depth_fit import PLANTED, TRUTH, Fit, planted, read_table
from nagjax.errors import UserError

REFERENCE = Path(__file__).parents[3] / "shared" / "reference" / "chinchilla_runs.csv"


def _points(table: dict) -> tuple[np.ndarray, np.ndarray]:
    return np.stack([table["d_model"], table["n_layers"], table["num_tokens"]], axis=1), table["loss"]


def test_planted_exponents_are_recovered_exactly_without_noise(monkeypatch):
    monkeypatch.setitem(TRUTH, "noise", 0.0)
    law = fit(*_points(planted()))
    np.testing.assert_allclose(law.exponents, TRUTH["exponents"], rtol=1e-5)
    np.testing.assert_allclose(np.exp(law.log_coefficients), TRUTH["coefficients"], rtol=1e-4)
    np.testing.assert_allclose(law.irreducible, TRUTH["irreducible"], rtol=1e-5)


def test_planted_exponents_lie_in_the_bootstrap_interval_and_the_fit_is_an_optimum():
    x, loss = _points(planted(seed=3))
    law = fit(x, loss)
    assert law.gradient < 1e-5
    low, high = np.quantile(bootstrap_parameters(x, loss, law, 100), [0.01, 0.99], axis=0)
    truth = np.array([*np.log(TRUTH["coefficients"]), *TRUTH["exponents"], np.log(TRUTH["irreducible"])])
    assert np.all((low < truth) & (truth < high)) and np.all(high[3:6] - low[3:6] < 1.5)
    held = profile(x, loss, 1, [law.exponents[1], 2.5])
    np.testing.assert_allclose(held[0], law.risk, rtol=1e-6)
    assert held[1] > law.risk


def test_ties_with_the_last_dropped_point_go_too():
    np.testing.assert_array_equal(drop_highest(np.array([1.0, 3.0, 2.0, 3.0]), 1), [True, False, True, False])
    assert drop_highest(np.array([1.0, 2.0]), 0).all()


@pytest.mark.skipif(not REFERENCE.exists(), reason="the Chinchilla runs are not here")
def test_the_reference_fit_of_the_chinchilla_runs():
    x, loss = _points(read_table(str(REFERENCE)))
    exponents = {}
    for dropped in (1, 20, 40, 60, 80):
        stays = drop_highest(loss, dropped)
        law = fit(x[stays], loss[stays])
        exponents[dropped] = law.exponents[1]
        if dropped == 40:
            assert stays.sum() == 203
            np.testing.assert_allclose([law.exponents[0], law.risk], [0.945, 0.003027], rtol=1e-3)
    expected = {1: 1.20, 20: 1.04, 40: 1.33, 60: 1.66, 80: 1.87}
    assert {dropped: round(value, 2) for dropped, value in exponents.items()} == pytest.approx(expected, abs=0.011)


@pytest.mark.parametrize(
    "low, high, scanned, verdict",
    [
        (1.2, 1.5, 1.0, "not supported"),
        (0.5, 0.8, 1.0, "not supported"),
        (0.9, 1.1, 1.0, "supported"),
        (0.9, 1.1, 2.0, "undecided"),
    ],
)
def test_verdicts(low, high, scanned, verdict):
    """On the interval of depth's exponent, and on the exponents with other numbers of points left out."""
    recipe = load("inverse_depth_fit")
    settings = dataclasses.replace(recipe.settings("smoke"), csv="chinchilla.csv")
    records = []
    for dropped in (settings.main, settings.main + 1):
        exponent = scanned if dropped > settings.main else (low + high) / 2
        one = {"estimate": exponent, "low": low, "high": high}
        law = {"exponents": [1.0, exponent, 1.0], "risk": 0.1, "gradient": 0.0, "irreducible": 1.0}
        metrics = {"exponents": [one] * 3, "law": law, "points": 9, "parameters_and_data": {"risk": 0.2}}
        records.append(Record("", {"dropped": dropped, "offset": 0}, {}, metrics | {"correlation": 0.0}))
    assert recipe.summarise(settings, records).verdict == verdict
    made_up = recipe.summarise(recipe.settings("smoke"), records)
    assert (made_up.verdict, made_up.reasons) == ("undecided", ["a made-up table"])
    shorter = [dataclasses.replace(one, metrics=one.metrics | {"rows": 240}) for one in records]
    assert recipe.summarise(settings, shorter).reasons == ["a table of 240 runs, not 245"]


def test_bad_tables(tmp_path):
    with pytest.raises(UserError, match="give a table"):
        read_table("")
    path = tmp_path / "runs.csv"
    path.write_text("d_model,loss\n1,2\n")
    with pytest.raises(UserError, match="n_layers"):
        read_table(str(path))
    path.write_text("d_model,n_layers,num_tokens,model_size,loss\n1,2,3,4,x\n")
    with pytest.raises(UserError, match="not a number"):
        read_table(str(path))
    path.write_text("d_model,n_layers,num_tokens,model_size,loss\n1,2,3\n")
    with pytest.raises(UserError, match="not a number"):
        read_table(str(path))


@pytest.mark.parametrize(
    "label, message", [({"dropped": 300}, "drop at most"), ({"offset": 99}, "the shallowest model has")]
)
def test_what_leaves_nothing_to_fit_is_refused(tmp_path, label, message):
    with pytest.raises(UserError, match=message):
        Fit("fit", {"dropped": 0, "offset": 0} | label, PLANTED, 2).run(tmp_path)
