"""The recipe's placements by their formulas, and the models of its source."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.harness.curse import variances
from experiments.harness.rates import Tuning
from nagjax.model.transformer import Transformer
from nagjax.residual import Boundary, find_scheme
from nagjax.residual.protocol import SublayerIndex
from tests.tiny import model_config, packed_batch
from tests.tolerance import assert_close

WIDTH, SUBLAYERS = 12, 6
BLOCKS = [1, 1, 2, 2, 3, 3]  # of the sublayers


@pytest.fixture
def recipe():
    """Imported here, because it registers schemes that tests which list the library's schemes must not see."""
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
    scheme, noise = recipe.ARMS[name].made(), np.random.default_rng(0)
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
    start = scheme.output_scale(SublayerIndex(3, SUBLAYERS))
    assert start == (pytest.approx(SUBLAYERS**-0.5) if name == "lns_scaled_start" else 1.0)


def test_in_front_of_the_norm_the_factor_is_one_of_epsilon(recipe):
    scheme = recipe.ARMS["lns_before_norm"].made()
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
    assert_close(variances(SimpleNamespace(model=model), batches), [want] * 4, terms=64, chain=24)


def test_the_published_size_has_the_models_of_the_source(recipe):
    jobs = recipe.COMPARISON.plan(recipe.SIZES["published"])
    configs = {job.labels["shape"]: job.run_config for job in jobs if "factor" in job.labels}
    assert list(configs) == ["130M", "250M", "350M", "1B"]
    for name, config in configs.items():
        vocab = 2 * 32_000 * config.model.width  # embedding and head
        hidden = 4 * config.model.width**2 + 3 * config.model.width * config.model.hidden
        assert (config.model.depth * hidden + vocab) / 1e6 == pytest.approx(
            {"130M": 134, "250M": 247, "350M": 368, "1B": 1339}[name], rel=0.01
        )
        assert config.train.batch * config.model.context == 512 * 256 and config.optimizer.clip == 0.0
    assert {job.labels["arm"] for job in jobs} == set(recipe.ARMS)
    assert sum(isinstance(job, Tuning) for job in jobs) == 4 * len(recipe.ARMS)
