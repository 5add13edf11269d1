"""A training loop of your own over plain arrays: Review Residuals, their initial values, and any optax chain.

    python examples/own_optimizer.py [STEPS]

The task is to learn all sums of two of the numbers 0 .. 12 modulo 13 by heart. The loop calls by name what the scheme
needs beside its forward pass: factors of the initial values of output projections (`nagjax.start_factors`), and no
decay on gates (`nagjax.optimizer`).
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import nagjax

NUMBERS, WIDTH, SUBLAYERS = 13, 48, 8


class Branch(nnx.Module):
    def __init__(self, residual: nagjax.Residual, i: int, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs), nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.down.kernel[...] *= nagjax.start_factors(residual, i).output

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class Network(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.second = (nnx.Embed(NUMBERS, WIDTH, rngs=rngs) for _ in range(2))
        self.residual = nagjax.Review(width=WIDTH, sublayers=SUBLAYERS, rngs=rngs)
        self.branches = nnx.List([Branch(self.residual, i, rngs) for i in range(1, SUBLAYERS + 1)])
        self.head = nnx.Linear(WIDTH, NUMBERS, rngs=rngs)

    def __call__(self, pairs):
        stream = self.residual.open(self.first(pairs[:, 0]) + self.second(pairs[:, 1]))
        for i, branch in enumerate(self.branches, 1):  # step by step; self.residual(x, self.branches) does the same
            stream = self.residual.advance(stream, branch(self.residual.read(stream, i)), i)
        return self.head(self.residual.close(stream))


def main(steps: int) -> float:
    model = Network(nnx.Rngs(0))
    graph, params, rest = nnx.split(model, nnx.Param, ...)
    rate = optax.warmup_cosine_decay_schedule(0.0, 1e-3, max(steps // 10, 1), steps)
    chain = optax.chain(optax.scale_by_lion(), optax.add_decayed_weights(0.1), optax.scale_by_learning_rate(rate))
    optimizer = nagjax.optimizer(chain, model)
    state = optimizer.init(params)
    pairs = jnp.stack(jnp.meshgrid(*[jnp.arange(NUMBERS)] * 2), axis=-1).reshape(-1, 2)
    sums = pairs.sum(axis=-1) % NUMBERS

    @jax.jit
    def step(params, state):
        def loss(params):
            logits = nnx.merge(graph, params, rest)(pairs)
            return optax.softmax_cross_entropy_with_integer_labels(logits, sums).mean()

        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(steps):
        params, state = step(params, state)
    return float((nnx.merge(graph, params, rest)(pairs).argmax(-1) == sums).mean())


if __name__ == "__main__":
    print(f"{main(int(sys.argv[1]) if len(sys.argv) > 1 else 60):.1%} of all sums are right, by chance 7.7%")
