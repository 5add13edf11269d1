"""The skip-class router: a token chooses between running and skipping as it would between two experts."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from nagjax.mod.routers import Router
from nagjax.residual.protocol import gate_parameter

RUN = 0  # the class; the other is to skip
LEAST = 2.0**-24  # probability, of which there are still odds


class Classes(nnx.Module):
    """`W` [2, D], starts normal with variance 1/D, and `b` [2] at zero: on average running and skipping start equally
    likely."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        self.weight = gate_parameter(jax.random.normal(rngs.params(), (2, width)) * width**-0.5, (None, "embed"))
        self.bias = gate_parameter(jnp.zeros((2,)), (None,))


@dataclasses.dataclass(frozen=True)
class SkipClassRouter(Router):
    """`p_i = softmax(W x_i + b)_run`; `x_i <- x_i + p_i f(X_selected)_i` for the selected, the others pass unchanged.

    This is a Mixture-of-Experts router with one expert, the sublayer, and one that does nothing: the no-op experts of
    Raposo et al. 2024 (arXiv:2404.02258, integrated MoDE), the null experts of Zeng et al. 2024 (arXiv:2406.13233) and
    the zero experts of Jin et al. 2024 (arXiv:2410.07348). Unlike the linear router's, its score is a probability: one
    threshold can serve all sublayers (`--mod.capacity adaptive`), and a token has a choice of its own, which the
    `balance` decider uses. For the experts of an MLP, `--moe.skips` adds such classes.
    """

    name: ClassVar[str] = "skip_class"
    common: ClassVar[bool] = True
    factor: ClassVar[bool] = True
    judges: ClassVar[bool] = True
    passes: ClassVar[float] = 3.0  # it learns by the update it weighs

    def parameters(self, width, rngs):
        return Classes(width, rngs)

    def multiply_adds(self, width, gate):
        return 2.0 * width

    def score(self, scheme, stream, own, at, where, noise):
        x = scheme.read(stream)
        weight = own.weight[...].astype(x.dtype)
        logits = jnp.einsum("btd,cd->btc", x, weight, preferred_element_type=jnp.float32) + own.bias[...]
        return jax.nn.softmax(logits, axis=-1)[..., RUN]

    def odds(self, scores):
        run = jnp.clip(scores, LEAST, 1.0 - LEAST)
        return jnp.log(run) - jnp.log1p(-run)

    def weigh(self, update, scores):
        return scores[..., None].astype(update.dtype) * update
