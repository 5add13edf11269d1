"""mHC: Hyper-Connections whose mixing neither amplifies nor forgets."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nagjax.residual.multi_stream import MultiStream, unit
from nagjax.residual.prenorm import Gain
from nagjax.residual.protocol import Boundary, SublayerIndex, gate_parameter

SINKHORN_STEPS = 20
ALPHA_START = 0.01


class Projection(nnx.Module):
    """`alpha (x phi) + b`, x [n, D] of RMS 1: phi starts normal with variance 1/(n D), b at zero."""

    def __init__(self, width: int, streams: int, outputs: int, rngs: nnx.Rngs):
        phi = jax.random.normal(rngs.params(), (streams, width, outputs), jnp.float32) * (streams * width) ** -0.5
        self.phi = gate_parameter(phi, (None, "embed", None))
        self.bias = gate_parameter(jnp.zeros((outputs,)), (None,))
        self.alpha = gate_parameter(jnp.float32(ALPHA_START), ())

    def __call__(self, x: Float[Array, "B T N D"]) -> Float[Array, "B T M"]:
        phi = self.phi[...].astype(x.dtype)
        product = jnp.einsum("btnd,ndm->btm", x, phi, preferred_element_type=jnp.float32)
        return self.alpha[...] * product + self.bias[...]


class Reading(Gain):
    """Parameters of a reader: the norm's gain, and those of H_pre."""

    def __init__(self, width: int, streams: int, rngs: nnx.Rngs):
        super().__init__(width)
        self.pre = Projection(width, streams, streams, rngs)


class Writing(nnx.Module):
    """Parameters of H_post and H_res."""

    def __init__(self, width: int, streams: int, rngs: nnx.Rngs):
        self.post = Projection(width, streams, streams, rngs)
        self.res = Projection(width, streams, streams**2, rngs)


@dataclasses.dataclass(frozen=True)
class MHC(MultiStream):
    """`X <- H_res X + H_post^T f_l(RMSNorm_l(H_pre X))`, X [n, D], Xie et al. 2025, arXiv:2512.24880:

        H_pre = sigmoid(h_pre);  H_post = 2 sigmoid(h_post);  H_res = Sinkhorn(exp(h_res)), doubly stochastic
        h     = alpha (RMSNorm(flat X) phi) + b,  each with its own phi, alpha = 0.01 and b

    Sinkhorn: 20 times, the columns and then the rows are divided by their sums. Where the paper is silent initial
    values are those of MaxText's implementation: phi with variance 1/(n D) and b at 0, so that every stream starts
    close to that of a pre-norm model. In all else this follows the paper's equations, from which MaxText differs: it
    normalises the streams before H_pre mixes them, begins Sinkhorn with a softmax and ends it with the columns, mixes
    with H_res transposed, and its head reads the sum of the streams; here the head reads through an H_pre of its own,
    which starts at half of that sum.
    """

    name: ClassVar[str] = "mhc"
    title: ClassVar[str] = "mHC"
    rebuilds: ClassVar[bool] = False

    def entry(self, width: int, rngs: nnx.Rngs) -> nnx.Module:
        return Reading(width, self.streams, rngs)

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        return Writing(width, self.streams, rngs)

    def read_weights(self, hidden, at: Boundary):
        return jax.nn.sigmoid(at.entry.pre(unit(hidden, (-2, -1), self.epsilon)))

    def write_weights(self, hidden, at: Boundary):
        direction = unit(hidden, (-2, -1), self.epsilon)
        logits = at.gate.res(direction).reshape(*hidden.shape[:2], self.streams, self.streams)
        # H_res mixes by its rows, but `MultiStream` by columns.
        return jnp.swapaxes(sinkhorn(logits), -1, -2), 2.0 * jax.nn.sigmoid(at.gate.post(direction))


def sinkhorn(logits: Float[Array, "... N N"]) -> Float[Array, "... N N"]:
    """Makes `exp(logits)` doubly stochastic: rows sum to 1, columns nearly. The divisions are done in log space, where
    no entry underflows, however far apart the logits are."""

    def step(logs, _):
        return jax.nn.log_softmax(jax.nn.log_softmax(logs, axis=-2), axis=-1), None

    return jnp.exp(jax.lax.scan(step, logits, length=SINKHORN_STEPS)[0])
