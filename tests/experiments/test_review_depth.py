import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.harness.gradients import ReviewConvex
from nagjax.residual.protocol import Boundary, SublayerIndex

WIDTH = 16


def test_the_convex_gate_forgets_what_it_writes_over():
    scheme, rngs, one = ReviewConvex(), nnx.Rngs(0), jnp.int32(1)
    gate, entry = scheme.gate(WIDTH, SublayerIndex(one, 2), rngs), scheme.entry(WIDTH, rngs)
    noise = lambda seed, *shape: jax.random.normal(jax.random.key(seed), shape)  # noqa: E731
    gate.state[...], gate.update[...] = 0.3 * noise(1, WIDTH, WIDTH), 0.3 * noise(2, WIDTH, WIDTH)
    at = Boundary(gate, entry, one, one + 1, jnp.float32(1.0), 2)
    start = scheme.open(noise(3, 2, 3, WIDTH), at._replace(gate=None), scheme.ends(WIDTH, 1.0, rngs))
    update = noise(4, 2, 3, WIDTH)
    after, _ = scheme.advance(start, update, at)

    h, u = (np.asarray(x, np.float64) for x in (start.hidden, update))
    unit = lambda x: x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5)  # noqa: E731
    r = 1 / (1 + np.exp(-(unit(h) @ np.asarray(gate.state[...]) + unit(u) @ np.asarray(gate.update[...]))))
    assert r.min() < 0.4 and r.max() > 0.6
    np.testing.assert_allclose(after.hidden, (1 - r) * h + r * u, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(after.normed, unit((1 - r) * h + r * u), rtol=1e-3, atol=1e-4)
