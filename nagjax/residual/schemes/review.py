"""Review Residuals: a gate that reads the state and the proposed update."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.special import logit
from jaxtyping import Array, Float

from nagjax.ranges import Count
from nagjax.residual.prenorm import PreNorm, PreNormStream
from nagjax.residual.protocol import Boundary, SublayerIndex, gate_parameter
from pallas_kernels import review_update


class DenseGate(nnx.Module):
    """Parameters `W_h`, `W_u` [D, D] and the bias [D], all zeros: every gate starts at one half."""

    def __init__(self, width: int):
        self.state = gate_parameter(jnp.zeros((width, width)), ("embed", "embed_out"))
        self.update = gate_parameter(jnp.zeros((width, width)), ("embed", "embed_out"))
        self.bias = gate_parameter(jnp.zeros((width,)), ("embed_out",))

    def __call__(self, state, update):
        return state @ self.state[...].astype(state.dtype), update @ self.update[...].astype(update.dtype)

    def held_at(self, mean: Float[Array, "*L D"]) -> dict[str, Float[Array, "..."]]:
        """The parameter values with which the gate is `mean` for every token."""
        return {
            "state": jnp.zeros_like(self.state[...]),
            "update": jnp.zeros_like(self.update[...]),
            "bias": logit(mean),
        }


class LowRankGate(nnx.Module):
    """The gate with low-rank matrices: `W = A B`. A starts normal with variance 1/D and B at zero, so gates start at
    one half."""

    def __init__(self, width: int, rank: int, rngs: nnx.Rngs):
        down = jax.random.normal(rngs.params(), (2, width, rank), jnp.float32) * width**-0.5
        self.down = gate_parameter(down, (None, "embed", None))
        self.up = gate_parameter(jnp.zeros((2, rank, width)), (None, None, "embed_out"))
        self.bias = gate_parameter(jnp.zeros((width,)), ("embed_out",))

    def __call__(self, state, update):
        down, up = self.down[...].astype(state.dtype), self.up[...].astype(state.dtype)
        return (state @ down[0]) @ up[0], (update @ down[1]) @ up[1]

    def held_at(self, mean: Float[Array, "*L D"]) -> dict[str, Float[Array, "..."]]:
        """The parameter values with which the gate is `mean` for every token."""
        return {"up": jnp.zeros_like(self.up[...]), "bias": logit(mean)}


@dataclasses.dataclass(frozen=True)
class Review(PreNorm):
    """`r = sigmoid(W_h rms(h) + W_u rms(u) + b)`; `h <- h + r * u`, per channel.

    Kramer 2026, arXiv:2606.31859. `rms()` is RMSNorm without a gain. It is applied after the matrix product: `h W` is
    divided by the root mean square of h. Output projections start scaled by 1/sqrt(number of sublayers). The authors'
    optimizer decays all parameters; here gates do not decay, unless `--decay` names them.
    """

    name: ClassVar[str] = "review"
    title: ClassVar[str] = "Review Residuals"
    epsilon: ClassVar[float] = 1e-5

    rank: Count | None = None  # None: the paper's dense gate; a number: a cheaper gate of this rank, which is ours

    def gate(self, width, sublayer, rngs):
        return DenseGate(width) if self.rank is None else LowRankGate(width, self.rank, rngs)

    def output_scale(self, sublayer: SublayerIndex) -> float:
        return sublayer.sublayers**-0.5

    def advance(self, stream: PreNormStream, update, at: Boundary):
        update = update.astype(stream.hidden.dtype)
        from_state, from_update = at.gate(stream.hidden, update)
        bias, gain = at.gate.bias[...].astype(jnp.float32), at.entry.gain[...].astype(jnp.float32)
        hidden, normed = review_update(
            stream.hidden,
            update,
            from_state,
            from_update,
            bias,
            gain,
            self.read_scale(at.following),
            epsilon=self.epsilon,
        )
        gate = _gate(stream.hidden, update, from_state, from_update, bias, self.epsilon)
        return PreNormStream(hidden, normed), gate


def _gate(state, update, from_state, from_update, bias, epsilon: float):
    """The gate of the fused update, computed again for telemetry only (the compiler removes it unless it is read)."""

    def over_rms(product, row):
        mean_square = jnp.mean(row.astype(jnp.float32) ** 2, axis=-1, keepdims=True)
        return product.astype(jnp.float32) * jax.lax.rsqrt(mean_square + epsilon)

    return jax.nn.sigmoid(over_rms(from_state, state) + over_rms(from_update, update) + bias)
