"""An MLP-mixer of your own in Flax NNX, with NAG between its branches: which bar is in a noisy picture?

    python examples/own_nnx_model.py [STEPS]

It uses two things from nagjax: `nagjax.NAG`, made in `__init__` and called once in `__call__`, and `nagjax.optimizer`
around an optax chain.
"""

import sys

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import nagjax

PATCHES, WIDTH, BLOCKS, CLASSES = 16, 32, 4, 2


class MLP(nnx.Module):
    def __init__(self, width: int, rngs: nnx.Rngs):
        self.up, self.down = nnx.Linear(width, 2 * width, rngs=rngs), nnx.Linear(2 * width, width, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Across(MLP):
    """Mixes patches for each feature; a plain MLP mixes features for each patch."""

    def __call__(self, x):
        return super().__call__(x.mT).mT


class Mixer(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Linear(16, WIDTH, rngs=rngs)
        # Stacked over blocks, so that they are scanned; a list of 2 * BLOCKS callables would be unrolled.
        self.across = nnx.vmap(lambda rngs: Across(PATCHES, rngs))(rngs.split(BLOCKS))
        self.within = nnx.vmap(lambda rngs: MLP(WIDTH, rngs))(rngs.split(BLOCKS))
        self.residual = nagjax.NAG(width=WIDTH, sublayers=2 * BLOCKS, rngs=rngs)
        self.head = nnx.Linear(WIDTH, CLASSES, rngs=rngs)

    def __call__(self, pictures, progress=1.0):
        patches = pictures.reshape(-1, 4, 4, 4, 4).swapaxes(2, 3).reshape(-1, PATCHES, 16)
        x = self.residual(self.embed(patches), [self.across, self.within], progress=progress)
        return self.head(x.mean(axis=1))


def batch(seed: int, size: int = 64):
    """Pictures [B, 16, 16] of a horizontal (0) or vertical (1) bar at a random place."""
    kinds, places, noise = jax.random.split(jax.random.key(seed), 3)
    labels, place = jax.random.randint(kinds, (size,), 0, 2), jax.random.randint(places, (size, 1, 1), 0, 16)
    bars = jnp.mgrid[:16, :16][labels] == place
    return bars + 0.3 * jax.random.normal(noise, bars.shape), labels


def main(steps: int) -> float:
    model = Mixer(nnx.Rngs(0))
    chain = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(3e-3, weight_decay=0.05))
    optimizer = nnx.Optimizer(model, nagjax.optimizer(chain, model), wrt=nnx.Param)

    @nnx.jit
    def step(model, optimizer, pictures, labels, progress):
        def loss(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(pictures, progress), labels).mean()

        optimizer.update(model, nnx.grad(loss)(model))

    for i in range(steps):
        step(model, optimizer, *batch(i), i / steps)
    pictures, labels = batch(10**6, 512)
    return float((model(pictures).argmax(-1) == labels).mean())


if __name__ == "__main__":
    print(f"accuracy on new pictures {main(int(sys.argv[1]) if len(sys.argv) > 1 else 60):.1%}, by chance 50%")
