"""The linear router of Mixture-of-Depths."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from nagjax.mod.routers import Router
from nagjax.residual.protocol import gate_parameter


class Direction(nnx.Module):
    """`w` [D] of one sublayer, starts normal with variance 1/D, so that scores have unit variance."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.weight = gate_parameter(jax.random.normal(rngs.params(), (width,)) * width**-0.5, ("embed",))


WEIGHTS = {"tanh": lambda score: 1.0 + jnp.tanh(score), "sigmoid": jax.nn.sigmoid, "score": lambda score: score}


@dataclasses.dataclass(frozen=True)
class LinearRouter(Router):
    """`s_i = <w, x_i>`; `x_i <- x_i + g(s_i) f(X_selected)_i` for the selected, the others pass unchanged.

    Raposo et al. 2024, arXiv:2404.02258, have g(s) = s (`score`), which reverses an update if the score of a running
    token is negative: at the start, at a rate of an eighth, for two in five of these tokens. `sigmoid` and `tanh` keep
    the sign. `tanh` is g(s) = 1 + tanh(s) in (0, 2): at the start its average over all tokens is 1, the weight of an
    update without a router (experiments/LOG.md compares them). `x` is what the sublayer reads, the normalised residual.
    """

    name: ClassVar[str] = "linear"
    scale: ClassVar[float] = 1.0
    factor: ClassVar[bool] = True
    judges: ClassVar[bool] = True
    passes: ClassVar[float] = 3.0  # it learns by the update it weighs

    def parameters(self, width, rngs):
        return Direction(width, rngs)

    def multiply_adds(self, width, gate):
        return float(width)

    def odds(self, scores):
        return scores

    def score(self, scheme, stream, own, at, where, noise):
        x = scheme.read(stream)
        return jnp.einsum("btd,d->bt", x, own.weight[...].astype(x.dtype), preferred_element_type=jnp.float32)

    def weigh(self, update, scores):
        return WEIGHTS[self.weight](scores)[..., None].astype(update.dtype) * update
