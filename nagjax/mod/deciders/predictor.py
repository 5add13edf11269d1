"""The predictor decider."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from nagjax.mod.deciders import Decider
from nagjax.residual.protocol import gate_parameter

HIDDEN_WIDTH = 32


class Guess(nnx.Module):
    """`gelu(x A) b + c`. A [D, 32] starts normal with variance 1/D, b [32] and c at zero: undecided at the start."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        down = jax.random.normal(rngs.params(), (width, HIDDEN_WIDTH)) * width**-0.5
        self.down = gate_parameter(down, ("embed", None))
        self.out = gate_parameter(jnp.zeros((HIDDEN_WIDTH,)), (None,))
        self.bias = gate_parameter(jnp.float32(0.0), ())

    def __call__(self, x):
        hidden = jax.nn.gelu(x @ self.down[...].astype(x.dtype)).astype(jnp.float32)
        return jnp.dot(hidden, self.out[...], precision="highest") + self.bias[...]


@dataclasses.dataclass(frozen=True)
class Predictor(Decider):
    """A small MLP on the sublayer's input, detached, learns whether the token is in the top k (arXiv:2404.02258,
    section 3.5).

    Its loss reaches only its own parameters: the language model does not change.
    """

    name: ClassVar[str] = "predictor"

    def parameters(self, width, rngs):
        return Guess(width, rngs)

    def logits(self, own, router, x, scores, cut):
        return own(jax.lax.stop_gradient(x))
