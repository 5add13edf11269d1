"""Each measure against a closed form, or against its definition written out in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nagjax.measure import angles, damage, gradients, jacobian, lens, modulators, norms, outliers, similarity
from nagjax.measure.streams import composite_gain
from tests.tolerance import assert_close, close_to


@pytest.fixture
def rows():
    return np.random.default_rng(0).standard_normal((5, 7, 6)).astype(np.float32)


def in_a_plane(degrees, width=4):
    """Unit vectors at these angles, one token: [len, 1, width]."""
    radians = np.radians(degrees)
    return np.stack([np.cos(radians), np.sin(radians), *[0 * radians] * (width - 2)], -1)[:, None].astype(np.float32)


def test_norms(rows):
    h, update = rows[0], np.array([[2.0, 0, 0, 0, 0, 0]] * 7, np.float32) * rows[0][:, :1]
    wide = h.astype(np.float64)
    assert_close(norms.norm(h), np.linalg.norm(wide, axis=-1), terms=64, chain=4)
    assert_close(norms.variance(h), wide.var(axis=-1), terms=64, chain=4)
    length = np.linalg.norm(wide, axis=-1)
    assert_close(norms.relative_contribution(update, h), 2 * np.abs(wide[:, 0]) / length, terms=64, chain=4)
    assert_close(norms.cosine(update, h), np.abs(wide[:, 0]) / length, terms=64, chain=4)
    assert_close(norms.cosine(-3 * h, h), -1, terms=64, chain=4)
    np.testing.assert_array_equal(norms.cosine(0 * h, h), 0)


def test_angles_in_a_plane():
    h = in_a_plane([0, 10, 40, 41])
    assert_close(np.degrees(angles.angle(h[0], h[2])), 40, terms=64, chain=4)
    tiny = in_a_plane([0, 0.001])  # the arccos of a float32 cosine would be 0 or 0.02
    np.testing.assert_allclose(np.degrees(angles.angle(tiny[0], tiny[1])), 0.001, rtol=1e-3)
    distance = np.array([[abs(a - b) / 180 for a in (0, 10, 40, 41)] for b in (0, 10, 40, 41)])
    np.testing.assert_allclose(angles.angular_distances(h), distance, atol=1e-6)
    np.testing.assert_allclose(angles.block_influence(h), 1 - np.cos(np.radians([10, 30, 1])), atol=1e-6)
    np.testing.assert_allclose(np.degrees(angles.angle_to_end(h))[:, 0], [41, 31, 1, 0], atol=1e-3)


def test_updates_on_a_line_and_at_right_angles():
    line = np.cumsum(np.ones((4, 1, 3), np.float32), axis=0)
    np.testing.assert_allclose(angles.successive_update_angle(line), 0, atol=1e-6)
    assert_close(angles.progress_to_end(line)[:, 0], [0, 1 / 3, 2 / 3, 1], terms=64, chain=4)
    stairs = np.cumsum(np.eye(4, dtype=np.float32), axis=0)[:, None]
    assert_close(angles.successive_update_angle(stairs), np.pi / 2, terms=64, chain=4)


def test_a_block_that_wrote_nothing_has_no_angle_to_its_neighbours():
    """As those that a token skips."""
    updates = np.array([[1, 0], [0, 1], [0, 0], [0, 0], [1, 0]], np.float32)
    h = np.concatenate([np.ones((1, 1, 2)), np.ones((1, 1, 2)) + np.cumsum(updates, axis=0)[:, None]]).astype(
        np.float32
    )
    np.testing.assert_allclose(np.degrees(angles.successive_update_angle(h)[:, 0]), [90] + 3 * [np.nan], atol=1e-3)


def hsic_1(a, b):
    """Song et al. 2012: the unbiased estimate, of two Gram matrices."""
    n = len(a)
    a, b = (own - np.diag(np.diag(own)) for own in (a, b))
    sums = a.sum() * b.sum() / ((n - 1) * (n - 2)) - 2 / (n - 2) * (a.sum(0) @ b.sum(0))
    return (np.trace(a @ b) + sums) / (n * (n - 3))


def debiased(x, y):
    a, b = (own @ own.T for own in (x.astype(np.float64), y.astype(np.float64)))
    return hsic_1(a, b) / np.sqrt(hsic_1(a, a) * hsic_1(b, b))


def test_cka(rows):
    x, y = rows[0], rows[1]
    turned = x @ np.linalg.qr(rows[2][:6])[0] * 3.0 + 1.0
    assert_close(similarity.linear_cka(x, turned), 1, terms=64, chain=4)
    assert_close(similarity.linear_cka(x, y[:, :4]), debiased(x, y[:, :4]), terms=64, chain=4)
    want = [[debiased(p, q) for q in rows] for p in rows]
    assert np.min(want) < 0
    by_pair = [[similarity.linear_cka(p, q) for q in rows] for p in rows]
    assert_close(by_pair, want, terms=64, chain=4)
    assert_close(similarity.cka_matrix(1e12 * rows), want, terms=64, chain=4)
    for scale in (1e-9, 1e9):
        assert similarity.linear_cka(scale * x, scale * y) == close_to(want[0][1], terms=64, chain=4, scale=1)


def test_cka_of_few_tokens_is_not_that_of_their_number():
    """The biased estimate of these unrelated sets is 0.98, and 0.94 at the 256 tokens that a diagnosis samples."""
    noise = np.random.default_rng(0)
    sets = noise.standard_normal((6, 64, 4096)).astype(np.float32)
    turn = np.linalg.qr(noise.standard_normal((4096, 64)))[0].T.astype(np.float32)  # keeps what lies in its rows
    found = np.asarray(similarity.cka_matrix(sets + 3.0))
    between = found[np.triu_indices(6, 1)]
    assert abs(between.mean()) < 0.02 and between.min() < 0 and np.abs(between).max() < 0.1
    assert_close(np.diag(found), np.ones(6), terms=4096, chain=2)
    assert_close(found[0, 1], debiased(sets[0], sets[1]), terms=4096, chain=2, scale=1)
    inside = sets[0, :, :64]
    assert_close(similarity.linear_cka(inside, 0.1 * inside @ turn + 2.0), 1, terms=4096, chain=2)
    assert np.isfinite(similarity.cka_matrix(sets[:, :4])).all()
    assert np.isnan(similarity.cka_matrix(sets[:, :3])).all() and np.isnan(similarity.linear_cka(*sets[:2, :3]))


def test_ranks():
    spread = np.diag([3.0, 3.0, 3.0, 0.0]).astype(np.float32)
    assert similarity.effective_rank(spread) == close_to(3, terms=64, chain=4)
    assert similarity.stable_rank(spread) == close_to(3, terms=64, chain=4)
    uneven = np.diag([2.0, 1.0, 1.0]).astype(np.float32)
    assert similarity.effective_rank(uneven) == close_to(2 * np.sqrt(2), terms=64, chain=4)  # p = 1/2, 1/4, 1/4
    assert similarity.stable_rank(uneven) == close_to(1.5, terms=64, chain=4)
    x = np.random.default_rng(1).standard_normal((9, 3))
    assert similarity.linear_map_error(x @ np.ones((3, 5)), x) == pytest.approx(0, abs=1e-10)
    assert similarity.linear_map_error(np.eye(4)[:, :1], np.eye(4)[:, 1:]) == pytest.approx(1)


def test_outliers():
    spike = np.eye(8, dtype=np.float32)[:1]
    centred = np.eye(8)[0] - 1 / 8
    assert outliers.kurtosis(spike)[0] == close_to((centred**4).mean() / (centred**2).mean() ** 2, terms=64, chain=4)
    normal = np.random.default_rng(0).standard_normal((1, 200_000)).astype(np.float32)
    for scale in (1e-12, 1.0, 1e12):
        assert outliers.kurtosis(np.float32(scale) * normal)[0] == pytest.approx(3, abs=0.05)
    assert outliers.kurtosis(0 * normal)[0] == 0
    assert outliers.massive_ratio(np.array([[1.0, -2, 3, -50, 2]]))[0] == 25


def test_sinks():
    tokens = 4
    even = np.tril(np.ones((tokens, tokens))) / np.arange(1, tokens + 1)[:, None]
    sink = np.tile(np.eye(tokens)[0], (tokens, 1))
    weights = np.stack([even, sink])[None]
    first = np.arange(tokens)[None] == 0
    alpha = outliers.first_token_attention(weights, first, ~first)
    assert_close(alpha, [(1 / 2 + 1 / 3 + 1 / 4) / 3, 1], terms=64, chain=4)
    assert outliers.sink_rate(alpha, 0.5) == 0.5 and outliers.sink_rate(alpha) == 1.0


def test_lens():
    p, q = np.array([[0.7, 0.2, 0.1]]), np.array([[0.1, 0.3, 0.6]])
    got = lens.lens_divergence(np.log(p) + 5, np.log(q))
    assert_close(got, [(p * np.log(p / q)).sum()], terms=64, chain=4)
    np.testing.assert_allclose(lens.top_overlap(np.log(p), np.log(q), top=2), 0.5)  # {0, 1} and {1, 2}


def test_damage():
    assert damage.skip_effect(np.array([3.0, 4]), np.array([3.0, 0])) == pytest.approx(0.8)
    assert damage.skip_effect(np.zeros(2), np.array([1e-6, 0])) == pytest.approx(1)
    blocks = 6
    even = np.triu(np.ones((blocks, blocks)), 1)
    assert damage.depth_score(even) == pytest.approx(blocks / 2)
    late = even * (np.arange(blocks) == 3)[:, None]
    assert damage.depth_score(late) == 4
    assert np.isnan(damage.depth_score(0 * even))
    assert damage.contributing(np.array([1.0, 1, 1, 0, -5])) == pytest.approx(3)
    assert damage.contributing(np.zeros(3)) == 0
    logits = np.array([[100.0, 0], [0, 100.0], [1.0, 1.0]])
    changed = np.array([[0, 100.0], [0, 100.0], [7.0, 7.0]])
    np.testing.assert_allclose(damage.output_effect(logits, changed), [np.sqrt(2), 0, 0], atol=1e-6)


def test_jacobian_of_a_linear_map(rows):
    matrix = rows[0, :6] * 0.1
    h = np.zeros((4000, 6), np.float32)
    got = jacobian.identity_distance(lambda x: x + x @ matrix, h, jax.random.key(0))
    assert jnp.mean(got) == pytest.approx((matrix**2).sum() / 6, rel=0.05)
    assert_close(jacobian.identity_distance(lambda x: 3 * x, h[:2], jax.random.key(1), 2), 4, terms=64, chain=4)


def test_integrated_gradients_add_up(rows):
    f = lambda x: jnp.sum(jnp.tanh(x) ** 2 + x[..., :1] ** 3 / 10)  # noqa: E731
    h, base = rows[0], 0.1 * rows[1]
    got = jacobian.integrated_gradients(f, h, base, steps=256)
    assert jnp.sum(got) == pytest.approx(float(f(h) - f(base)), rel=1e-3)


def test_taps_tell_the_gradient_and_change_nothing(rows):
    weights = rows[1]

    def loss(h, meter):
        return jnp.sum(gradients.tap(h, meter) * weights)

    value, (to_h, to_meter) = jax.value_and_grad(loss, (0, 1))(rows[0], jnp.float32(0))
    assert value == close_to((rows[0] * weights).sum(), terms=64, chain=4)
    np.testing.assert_array_equal(to_h, weights)
    assert to_meter == close_to((weights.astype(np.float64) ** 2).sum(), terms=64, chain=4)
    tree = {"a": rows, "b": rows[:, 0]}
    together = np.concatenate([rows.reshape(5, -1), rows[:, 0]], axis=1).astype(np.float64)
    assert_close(gradients.stacked_norms(tree), np.linalg.norm(together, axis=1), terms=64, chain=4)


def test_spikes():
    calm = np.tile([1.0, -1.0], 600)
    calm[[1100, 1150]] = 7.5, 6.0  # over seven deviations of 1, and not
    assert gradients.spike_score(calm) == pytest.approx(1 / 200)
    assert np.isnan(gradients.spike_score(calm[:1000]))
    bad = np.insert(calm, [3, 1050, 1120], [np.nan, np.nan, np.inf])  # neither steps nor parts of a window
    assert gradients.spike_score(bad) == gradients.spike_score(calm)
    assert np.isnan(gradients.spike_score(np.insert(calm[:1000], 500, np.nan)))


def test_modulators():
    m = np.array([0.0, 1.0, 0.5, 0.9])
    expected = {"turn": 0.04, "modulator": 0.5, "spread": np.sqrt(1 / 6), "closed": 1 / 3, "open": 1 / 3, "dead": 1.0}
    for weight in (1.0, 1e-3):
        got = modulators.health(0.08 * m, m, weight * np.array([1.0, 1, 1, 0]))
        assert {name: float(value) for name, value in got.items()} == pytest.approx(expected, rel=1e-5)


def test_composite_gain_of_mixed_streams():
    mixing = np.array([[[0.5, 0.5], [0.5, 0.5]], [[2.0, 0.0], [0.0, 1.0]]])
    assert [float(gain) for gain in composite_gain(mixing)] == [2.0, 1.5]
