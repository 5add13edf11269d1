"""Do activations keep their size as a model grows? The coordinate check of Yang et al. 2022, arXiv:2203.03466, App. D.

    python -m nagjax.measure.coordinates completep completep  # scheme, parametrization

This trains models of several widths and depths for a few steps on one batch. It prints how much the steps have changed
each kind of activation, and the slope of this change over the size, both logarithmic: 0 is flat.
"""

import sys
from collections.abc import Iterable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jaxtyping import Array, Float

from nagjax.errors import UserError
from nagjax.measure.interventions import residual, through
from nagjax.model.config import ModelConfig
from nagjax.model.transformer import Transformer
from nagjax.residual import Scheme, find_scheme
from nagjax.runs.config import OptimizerConfig
from nagjax.train.own_model import optimizer

WIDTHS, DEPTHS = (64, 128, 256, 512), (4, 8, 16, 32, 64)
BATCH, TOKENS, VOCAB, STEPS, BASE = 2, 16, 64, 4, 16
RATE = 5e-4  # of matrices at width 64; small, so that what a norm bounds is far from its bound


class Changes(NamedTuple):
    """What the training has changed: root mean squares over tokens and features, float32."""

    blocks: Float[Array, ""]  # what all blocks together add to the residual, relative to the residual at the start
    hidden: Float[Array, ""]  # what the head reads
    logits: Float[Array, ""]


class _Seen(NamedTuple):
    """Activations of one forward pass."""

    embedded: Float[Array, "B T D"]
    residual: Float[Array, "B T D"]
    hidden: Float[Array, "B T D"]
    logits: Float[Array, "B T V"]


def changes(model: ModelConfig, scheme: Scheme, config: OptimizerConfig, seed: int = 0) -> Changes:
    """How much STEPS steps on one batch of random tokens change what a model computes."""
    tokens, targets = jax.random.randint(jax.random.key(seed), (2, BATCH, TOKENS), 0, model.vocab)
    make = lambda: Transformer(model, scheme, nnx.Rngs(seed))  # noqa: E731
    tx = optimizer(config, nnx.eval_shape(make), steps=100)

    def around(model: Transformer, stream, call):
        after = through(model, stream, call)
        return after, (residual(model.scheme, stream), residual(model.scheme, after))

    def loss(params, graph) -> tuple[Float[Array, ""], _Seen]:
        live = nnx.merge(graph, params)
        output = live(tokens, intervene=around)
        logits, (before, after) = live.logits(output), output.seen
        seen = _Seen(before[0], after[-1], output.hidden.astype(jnp.float32), logits)
        return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean(), seen

    @jax.jit
    def trained() -> Changes:
        graph, start = nnx.split(make())

        def step(carry, _):
            params, state = carry
            grads, seen = jax.grad(loss, has_aux=True)(params, graph)
            updates, state = tx.update(grads, state, params)
            return (optax.apply_updates(params, updates), state), seen

        _, seen = jax.lax.scan(step, (start, tx.init(start)), None, length=STEPS + 1)
        one, two = (jax.tree.map(lambda x, i=i: x[i], seen) for i in (0, -1))
        added = (two.residual - two.embedded) - (one.residual - one.embedded)
        return Changes(_rms(added) / _rms(one.residual), _rms(two.hidden - one.hidden), _rms(two.logits - one.logits))

    return trained()


def _rms(x: Float[Array, "..."]) -> Float[Array, ""]:
    return jnp.sqrt(jnp.mean(x**2))


def slopes(sizes: Iterable[int], found: Iterable[Changes]) -> Changes:
    """Least-squares slope of the changes over the sizes, both logarithmic: when the size doubles, the change grows by
    the factor `2**slope`."""
    logs = np.log(np.array([*sizes], float))
    columns = zip(*found, strict=True)
    return Changes(*(float(np.polyfit(logs, np.log(np.array(column, float)), 1)[0]) for column in columns))


def changes_at(scheme: Scheme, parametrization: str = "standard", optimizer: str = "adamw", **model: int) -> Changes:
    """`changes` of a small model, by default 2 blocks x 64. Heads have 16 features at every width.

    The base width is 16: the head's random initial rows turn a changed residual into a part of the logits' change that
    shrinks with the root of the width, as it should; above this width it is a small part.
    """
    chosen = {"depth": 2, "width": 64, "context": TOKENS, "vocab": VOCAB, "dtype": "float32"} | model
    chosen |= {"heads": chosen["width"] // 16, "parametrization": parametrization, "base_width": BASE}
    rate = RATE * (1 if parametrization == "standard" else 64 / BASE)
    config = OptimizerConfig(optimizer=optimizer, lr=rate, schedule="constant", warmup=0.0, clip=0.0)
    return changes(ModelConfig(**chosen), scheme, config)


def main(scheme: str = "completep", parametrization: str = "completep", optimizer: str = "adamw") -> None:
    """Prints the check of one scheme under one parametrization."""
    for field, sizes in (("width", WIDTHS), ("depth", DEPTHS)):
        print(f"{field:>6}" + "".join(f"{column:>10}" for column in Changes._fields))
        found = []
        for size in sizes:
            found.append(changes_at(find_scheme(scheme)(), parametrization, optimizer, **{field: size}))
            print(f"{size:>6}" + "".join(f"{float(value):>10.4f}" for value in found[-1]), flush=True)
        print(" slope" + "".join(f"{slope:>+10.2f}" for slope in slopes(sizes, found)), flush=True)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except UserError as error:
        sys.exit(f"nagjax: error: {error}")
