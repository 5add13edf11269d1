"""nGPT: hidden states and matrices are normalised to the hypersphere."""

import dataclasses
import math
from typing import Annotated, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nagjax.ranges import Range
from nagjax.residual.direct import Direct
from nagjax.residual.protocol import Boundary, SublayerIndex, gate_parameter
from pallas_kernels.ops.nag_update import unit_rms

TINY = 1e-12  # added to a mean square: a row of zeros stays zero


def unit(x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
    """x with unit RMS along the last axis, float32."""
    return unit_rms(x.astype(jnp.float32), TINY)


class Scaled(nnx.Module):
    """A learned factor whose stored value 1/sqrt(D) stands for its initial value. The size of Adam's steps does not
    depend on the size of a parameter, so the factor learns sqrt(D) times as fast (Section 2.5 of the source)."""

    def __init__(self, shape: tuple[int, ...], axes: tuple[str | None, ...], width: int):
        self.scale = gate_parameter(jnp.full(shape, width**-0.5, jnp.float32), axes)

    def __call__(self, start: float, width: int) -> Float[Array, "..."]:
        return self.scale[...] * (start * width**0.5)


@dataclasses.dataclass(frozen=True)
class NGPT(Direct):
    """`h <- Norm(h + abs(alpha_l) (Norm(f_l(h)) - h))`, alpha_l [D] learned; logits `s_z <h, w_v>` with h and rows w_v
    of unit length.

    Loshchilov et al. 2024, "nGPT: Normalized Transformer with Representation Learning on the Hypersphere",
    arXiv:2410.01131. At initialisation and after every step, all matrices and both tables are normalised along their
    embedding axis: matrices that read the residual by column; those that write to it, and the tables, by row. alpha
    starts at `start`, s_z at 1; both are stored so that 1/sqrt(D) stands for the initial value.

    The stream here has unit RMS, so its length is sqrt(D) times the source's unit length. Its product with a column of
    length 1 therefore has standard deviation 1: the stream contains the factor sqrt(D) that the source puts before the
    MLP's nonlinearity. The outputs of attention and MLP may have any scale, as Norm follows. The source's unit queries
    and keys with softmax scale sqrt(d_head) are the library's QK-norm (on by default) with 1/sqrt(d_head).

    Weight decay has one effect on a matrix that is normalised after each step: the step becomes 1 / (1 - rate * decay)
    times as long. The source uses neither decay nor warm-up; warm-up is an option of the optimizer. Choices and
    omissions: s_z is one number instead of one per vocabulary entry, since a scheme does not know the vocabulary; the
    factors s_u, s_v per hidden feature and s_qk per head and feature, which follow the rotary positions, stay at 1
    (`block.qk_gain` adds gains before the rotary positions, shared by all heads or for a whole row). Optional gains and
    biases of a block are not normalised.
    """

    name: ClassVar[str] = "ngpt"
    title: ClassVar[str] = "nGPT"
    learning_rate: ClassVar[float] = 8e-3  # plain's; not tuned
    router: ClassVar[str] = "random"
    scale_free: ClassVar[bool] = True

    start: Annotated[float, Range(gt=0, le=1)] = 0.05  # initial value of alpha, the share of the way to the update

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        return Scaled((width,), ("embed",), width)

    def ends(self, width: int, embedding_std: float, rngs: nnx.Rngs) -> nnx.Module:
        return Scaled((), (), width)

    def constrain(self, value, axes, role):
        """Normalises matrices and tables to unit length along the embedding axis."""
        if role not in ("matrix", "embedding", "head") or "embed" not in axes:
            return value
        axis = axes.index("embed") - len(axes)
        return value * jax.lax.rsqrt(jnp.sum(value**2, axis=axis, keepdims=True) + TINY)

    def open(self, embedding, at: Boundary, ends) -> Float[Array, "B T D"]:
        return unit(embedding).astype(embedding.dtype)

    def advance(self, stream, update, at: Boundary):
        h = stream.astype(jnp.float32)
        alpha = jnp.abs(at.gate(self.start, h.shape[-1]))
        return unit(h + alpha * (unit(update) - h)).astype(stream.dtype), alpha[None, None]

    def close(self, stream, ends):
        width = stream.shape[-1]
        hidden = (ends(1.0, width) * stream.astype(jnp.float32)).astype(stream.dtype)
        return hidden, jnp.full(stream.shape[:-1], -0.5 * math.log(width), jnp.float32)
