"""Additive Highway residual: the gate reads only the state, not the update."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.special import logit
from jaxtyping import Array, Float

from nagjax.residual.prenorm import PreNorm, PreNormStream
from nagjax.residual.protocol import Boundary, SublayerIndex, gate_parameter


class StateGate(nnx.Module):
    """`sigmoid(W h + b)`. W [D, D] starts normal with standard deviation 0.02 at every width, b [D] at zero."""

    def __init__(self, width: int, rngs: nnx.Rngs):
        weight = 0.02 * jax.random.normal(rngs.params(), (width, width), jnp.float32)
        self.weight = gate_parameter(weight, ("embed", "embed_out"))
        self.bias = gate_parameter(jnp.zeros((width,)), ("embed_out",))

    def __call__(self, state):
        product = (state @ self.weight[...].astype(state.dtype)).astype(jnp.float32)
        return jax.nn.sigmoid(product + self.bias[...])

    def held_at(self, mean: Float[Array, "*L D"]) -> dict[str, Float[Array, "..."]]:
        """The parameter values with which the gate is `mean` for every token."""
        return {"weight": jnp.zeros_like(self.weight[...]), "bias": logit(mean)}


@dataclasses.dataclass(frozen=True)
class Highway(PreNorm):
    """`r = sigmoid(W h + b)`; `h <- h + r * f(RMSNorm(h))`. Srivastava et al. 2015, in the additive form to which
    arXiv:2606.31859 compares Review Residuals. That paper decays the gates as it decays all parameters; here gates do
    not decay, unless `--decay` names them. W starts with the paper's standard deviation of 0.02 at every width and
    under every parametrization, so that W h has standard deviation 0.02 sqrt(D) for a state of unit RMS."""

    name: ClassVar[str] = "highway"
    title: ClassVar[str] = "Highway (additive)"

    def gate(self, width, sublayer, rngs):
        return StateGate(width, rngs)

    def output_scale(self, sublayer: SublayerIndex) -> float:
        return sublayer.sublayers**-0.5

    def carry(self, gate):
        """The factor on the old state."""
        return 1.0

    def advance(self, stream: PreNormStream, update, at: Boundary):
        gate = at.gate(stream.hidden)
        hidden = (self.carry(gate) * stream.hidden + gate * update).astype(stream.hidden.dtype)
        return PreNormStream(hidden, self.normalise(hidden, at)), gate
