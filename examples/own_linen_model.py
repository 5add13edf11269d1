"""A residual network of your own in Flax Linen, with NAG between its branches, on points of two spirals.

    python examples/own_linen_model.py [STEPS]

It uses two things from nagjax: `nagjax.linen.NAG` in place of the additions, and `nagjax.optimizer`, which reads the
roles of the parameters from their boxes (as `init` returns them, before `nn.unbox`).
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn

import nagjax

WIDTH, SUBLAYERS = 32, 12


class Branch(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(x)))


class Network(nn.Module):
    @nn.compact
    def __call__(self, points, progress=1.0):
        x = nn.Dense(WIDTH, name="embed")(jnp.concatenate([points, jnp.sin(3 * points)], axis=-1))
        residual = nagjax.linen.NAG(width=WIDTH, sublayers=SUBLAYERS)
        x = residual(x, [Branch() for _ in range(SUBLAYERS)], progress=progress)  # rows [N, D]: no token axis
        return nn.Dense(1)(x)[..., 0]


def batch(seed: int, size: int = 256):
    """Points [N, 2] on two interleaved spirals, and the spiral that each is on."""
    turn, kind, noise = jax.random.split(jax.random.key(seed), 3)
    angle, labels = 1 + 6 * jax.random.uniform(turn, (size,)), jax.random.bernoulli(kind, shape=(size,))
    way = angle + jnp.pi * labels
    points = angle[:, None] / 4 * jnp.stack([jnp.cos(way), jnp.sin(way)], axis=-1)
    return points + 0.05 * jax.random.normal(noise, points.shape), labels


def main(steps: int) -> float:
    network = Network()
    boxed = network.init(jax.random.key(0), batch(0)[0])["params"]
    optimizer, params = nagjax.optimizer(optax.adamw(3e-3, weight_decay=0.01), boxed), nn.unbox(boxed)
    state = optimizer.init(params)

    @jax.jit
    def step(params, state, points, labels, progress):
        def loss(params):
            logits = network.apply({"params": params}, points, progress)
            return optax.sigmoid_binary_cross_entropy(logits, labels).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        params, state = step(params, state, *batch(i), i / steps)
    points, labels = batch(10**6, 1024)
    return float(((network.apply({"params": params}, points) > 0) == labels).mean())


if __name__ == "__main__":
    print(f"accuracy on new points {main(int(sys.argv[1]) if len(sys.argv) > 1 else 80):.1%}, by chance 50%")
