"""Hyper-Connections: several residual streams, mixed by learned matrices that depend on the token."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nagjax.residual.multi_stream import MultiStream, unit
from nagjax.residual.prenorm import Gain
from nagjax.residual.protocol import Boundary, SublayerIndex, gate_parameter

DYNAMIC_START = 0.01  # s


class Reading(Gain):
    """Parameters of a reader: the norm's gain, and those of A_m, whose static part is stored as its difference from its
    initial value."""

    def __init__(self, width: int, streams: int):
        super().__init__(width)
        self.moved = gate_parameter(jnp.zeros((streams,)), (None,))
        self.weight = gate_parameter(jnp.zeros((width,)), ("embed",))
        self.scale = gate_parameter(jnp.float32(DYNAMIC_START), ())


class Writing(nnx.Module):
    """Parameters of A_r and B."""

    def __init__(self, width: int, streams: int):
        self.mixing = gate_parameter(jnp.eye(streams), (None, None))
        self.mixing_weight = gate_parameter(jnp.zeros((width, streams)), ("embed", None))
        self.mixing_scale = gate_parameter(jnp.float32(DYNAMIC_START), ())
        self.output = gate_parameter(jnp.ones((streams,)), (None,))
        self.output_weight = gate_parameter(jnp.zeros((width,)), ("embed",))
        self.output_scale = gate_parameter(jnp.float32(DYNAMIC_START), ())


@dataclasses.dataclass(frozen=True)
class HyperConnections(MultiStream):
    """`H <- A_r^T H + B^T f_l(RMSNorm_l(A_m^T H))`, H [n, D], with `A = A_static + s tanh(norm(H) W)` for A_m [n, 1],
    A_r [n, n] and B [n]: dynamic Hyper-Connections (DHC), Zhu et al. 2024, arXiv:2409.19606, Section 2.

    Initially W = 0, s = 0.01, B = 1, A_r = I, and A_m of sublayer k = 1, 2, ... reads stream (k - 1) mod n, so that
    every stream is the ordinary pre-norm residual. Output projections start 1/sqrt(n) as large. The paper (Section 4)
    scales them "by a factor of sqrt(n)" so that the sum of the streams keeps the standard deviation of an ordinary
    residual; the factor 1/sqrt(n) comes nearer to this aim than sqrt(n). The head reads through an A_m, too, which
    starts as the sum of all streams, as in the paper. `norm` is an RMSNorm (the authors': LayerNorm) without a gain,
    since W could absorb it. A_m has its own s; the authors' code shares one between A_m and A_r. Of these parameters
    the authors decay only W; here all of them are gates, which do not decay.
    """

    name: ClassVar[str] = "hyper_connections"
    title: ClassVar[str] = "Hyper-Connections"
    rebuilds: ClassVar[bool] = False

    def entry(self, width: int, rngs: nnx.Rngs) -> nnx.Module:
        return Reading(width, self.streams)

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        return Writing(width, self.streams)

    def output_scale(self, sublayer: SublayerIndex) -> float:
        return super().output_scale(sublayer) * self.streams**-0.5

    def read_weights(self, hidden, at: Boundary):
        own = at.entry
        one = jax.nn.one_hot((at.following - 1) % self.streams, self.streams, dtype=jnp.float32)
        start = jnp.where(at.following == 0, jnp.ones_like(one), one)
        dynamic = self.dynamic(hidden, own.weight[...][:, None], own.scale[...])[..., 0]
        return start + own.moved[...] + dynamic

    def write_weights(self, hidden, at: Boundary):
        own = at.gate
        mixing = own.mixing[...] + self.dynamic(hidden, own.mixing_weight[...], own.mixing_scale[...])
        output = self.dynamic(hidden, own.output_weight[...][:, None], own.output_scale[...])[..., 0]
        return mixing, own.output[...] + output

    def dynamic(
        self, hidden: Float[Array, "B T N D"], weight: Float[Array, "D M"], scale: Float[Array, ""]
    ) -> Float[Array, "B T N M"]:
        """`s tanh(norm(H) W)`."""
        direction = unit(hidden, -1, self.epsilon)
        product = jnp.einsum(
            "btnd,dm->btnm", direction, weight.astype(hidden.dtype), preferred_element_type=jnp.float32
        )
        return scale * jnp.tanh(product)
