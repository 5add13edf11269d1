"""The recipe's placements by their formulas, its table and its verdict by invented records."""

import math
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tolerance import assert_close

from experiments.harness.jobs import Record
from nagjax.model.transformer import Transformer
from nagjax.residual import Boundary, find_scheme
from nagjax.residual.protocol import Place
from tests.tiny import model_config, packed_batch

WIDTH, SUBLAYERS = 12, 6
BLOCKS = [1, 1, 2, 2, 3, 3]  # of the sublayers


@pytest.fixture
def recipe():
    """Loaded here and not above: it registers schemes, which tests that enumerate the library's must not meet."""
    from experiments import curse_of_depth

    return curse_of_depth


def unit(x, epsilon=1e-6):
    return x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + epsilon)


# By placement: factors on what sublayer 1 .. 6 reads, on its update, and on the sum, by its block.
ROOT = [block**-0.5 for block in BLOCKS]
ONES = [1.0] * SUBLAYERS
FACTORS = {
    "lns_on_mlp": ([1.0, ROOT[1], 1.0, ROOT[3], 1.0, ROOT[5]], ONES, ONES),
    "lns_on_attention": ([ROOT[0], 1.0, ROOT[2], 1.0, ROOT[4], 1.0], ONES, ONES),
    "lns_on_branch": (ONES, ROOT, ONES),
    "lns_before_norm": (ONES, ONES, ONES),
    "lns_on_residual": (ONES, ONES, ROOT),
    "lns_scaled_start": (ROOT, ONES, ONES),
}


@pytest.mark.parametrize("name", FACTORS)
def test_a_placement_is_its_formula(recipe, name):
    scheme, noise = recipe.scheme_of(name), np.random.default_rng(0)
    entry = scheme.entry(WIDTH, nnx.Rngs(0))
    gain = noise.uniform(0.5, 1.5, WIDTH)
    entry.gain[...] = jnp.asarray(gain, jnp.float32)
    h, *updates = noise.standard_normal((SUBLAYERS + 1, 2, 3, WIDTH))
    at = lambda index, following: Boundary(  # noqa: E731
        None, entry, jnp.int32(index), jnp.int32(following), jnp.float32(1.0), SUBLAYERS
    )
    reads, writes, sums = FACTORS[name]
    stream = scheme.open(jnp.asarray(h, jnp.float32), at(0, 1), None)
    for index, u in enumerate(updates, 1):
        np.testing.assert_allclose(scheme.read(stream), reads[index - 1] * gain * unit(h), rtol=1e-4, atol=1e-5)
        following = index + 1 if index < SUBLAYERS else 0
        stream, _ = scheme.advance(stream, jnp.asarray(u, jnp.float32), at(index, following))
        h = sums[index - 1] * (h + writes[index - 1] * u)
        np.testing.assert_allclose(stream.hidden, h, rtol=1e-4, atol=1e-5)
    hidden, _ = scheme.close(stream, None)
    np.testing.assert_allclose(hidden, gain * unit(h), rtol=1e-4, atol=1e-5)  # the final norm has no factor
    start = scheme.output_scale(Place(3, SUBLAYERS))
    assert start == (pytest.approx(SUBLAYERS**-0.5) if name == "lns_scaled_start" else 1.0)


def test_in_front_of_the_norm_the_factor_is_one_of_epsilon(recipe):
    scheme = recipe.scheme_of("lns_before_norm")
    entry = scheme.entry(WIDTH, nnx.Rngs(0))
    small = 1e-3 * np.random.default_rng(0).standard_normal((1, 1, WIDTH))
    at = Boundary(None, entry, jnp.int32(8), jnp.int32(9), jnp.float32(1.0), 10)  # block 5 reads
    got = scheme.normalise(jnp.asarray(small, jnp.float32), at)
    np.testing.assert_allclose(got, unit(small, 5e-6), rtol=1e-4)


def test_variances_are_those_of_the_counted_tokens_residuals(recipe):
    """In ReZero's start every residual is the embedding."""
    model = Transformer(model_config(), find_scheme("rezero")(), nnx.Rngs(0))
    batches = [packed_batch(seed) for seed in (0, 1)]
    rows = np.asarray(model.embedding.tokens[...], np.float64)
    want = np.mean([np.var(rows[batch.tokens][batch.weights > 0], axis=-1).mean() for batch in batches])
    assert_close(recipe.variances(SimpleNamespace(model=model), batches), [want] * 4, terms=64, chain=24)


def record(arm, seed, loss, factor=None, model="small"):
    labels = {"model": model, "arm": arm, "seed": seed} | ({} if factor is None else {"factor": factor})
    depth = {} if factor is not None else {"variance": [1.0, 2.0, 8.0], "damage": [0.5, 0.1 * seed]}
    return Record("", labels, {}, {"loss": loss} | depth)


def runs(arm, loss, best=1.0):
    """The grid on seed 0, then seeds 1 and 2 at its best, each a little apart."""
    grid = [record(arm, 0, loss + abs(math.log(factor / best)), factor) for factor in (0.3, 1.0, 3.0)]
    return grid + [record(arm, seed, loss + 0.001 * seed) for seed in (1, 2)]


def judged(recipe, behind, **changes):
    arms = (recipe.JUDGED, *recipe.RIVALS, recipe.CAVEAT, *recipe.PLACEMENTS)
    settings = recipe.Settings(("small",), 64, 8, 3, arms)
    losses = {arm: 2.0 + behind.get(arm, 0.1) for arm in arms if arm != recipe.JUDGED}
    own = runs(recipe.JUDGED, 2.0, **changes) + [one for arm, loss in losses.items() for one in runs(arm, loss)]
    return settings, own


def test_each_arm_is_judged_at_its_best_rate_over_all_seeds(recipe):
    settings, own = judged(recipe, {"lns_scaled_start": 0.02}, best=3.0)
    summary = recipe.summarise(settings, own)
    assert summary.verdict == "supported"
    row = next(row for row in summary.table if row["arm"] == recipe.JUDGED)
    assert row["lr x"] == "3 (edge)" and row["loss"].startswith("2.0010 [")
    assert row["variance, last / first"] == 8.0 and row["damage, late / early"] == "0.1500 / 0.5000"
    assert "with the scaled start lns_scaled_start +0.0200" in summary.measured
    assert summary.details["at_the_grid_edge"] == ["small-lns"]
    assert recipe.draw(settings, own).axes


def test_verdicts(recipe):
    verdict = lambda behind: recipe.summarise(*judged(recipe, behind)).verdict  # noqa: E731
    assert verdict({}) == "supported"
    assert verdict({"lns_on_mlp": -0.1, "lns_scaled_start": -0.1}) == "supported"  # no rivals
    assert verdict({"sandwich": -0.1}) == "not supported"
    settings, own = judged(recipe, {})
    noisy = [one for one in own if one.labels["arm"] != "peri_ln" or "factor" in one.labels]
    noisy += [record("peri_ln", seed, loss) for seed, loss in ((1, 1.9), (2, 2.4))]
    assert recipe.summarise(settings, noisy).verdict == "undecided"

    def without(arm):
        return [r if r.labels["arm"] != arm else Record("", r.labels, {}, {"loss": None}) for r in own]

    gone = recipe.summarise(settings, without("post_ln"))
    assert gone.verdict == "supported" and "post_ln diverged" in gone.measured
    assert recipe.summarise(settings, without(recipe.JUDGED)).verdict == "not supported"
    assert recipe.draw(settings, without("post_ln")).axes


def test_a_seed_that_diverges_at_the_best_rate_is_a_divergence(recipe):
    settings, own = judged(recipe, {})
    own = [r for r in own if not (r.labels["arm"] == "rezero" and r.labels["seed"] == 2)] + [record("rezero", 2, None)]
    assert "rezero diverged" in recipe.summarise(settings, own).measured


def test_the_paper_size_has_the_models_of_the_source(recipe):
    jobs = recipe.plan(recipe.SIZES["paper"])
    configs = {job.labels["model"]: job.run_config for job in jobs if "factor" in job.labels}
    assert list(configs) == ["130M", "250M", "350M", "1B"]
    for name, config in configs.items():
        vocab = 2 * 32_000 * config.model.width  # embedding and head
        hidden = 4 * config.model.width**2 + 3 * config.model.width * config.model.hidden
        assert (config.model.depth * hidden + vocab) / 1e6 == pytest.approx(
            {"130M": 134, "250M": 247, "350M": 368, "1B": 1339}[name], rel=0.01
        )
        assert config.train.batch * config.model.context == 512 * 256 and config.optimizer.clip == 0.0
    assert {arm for arm in recipe.SIZES["paper"].arms} == {job.labels["arm"] for job in jobs}
