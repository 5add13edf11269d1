"""Post-LN with LayerNorm, its gain and bias, and a norm on the embedding: BERT's residual."""

import dataclasses
from typing import ClassVar

from flax import nnx
from jaxtyping import Array, Float

from nagjax.ranges import Fraction
from nagjax.residual.norm import layer_norm
from nagjax.residual.protocol import Boundary, SublayerIndex
from nagjax.residual.schemes.layer_norm import Affine
from nagjax.residual.schemes.post_ln import PostLN


@dataclasses.dataclass(frozen=True)
class PostLayerNorm(PostLN):
    """`h <- LN_0(embedding)`; `h <- LN_l(h + f_l(h))`, `LN(x) = gain (x - mean(x)) / sqrt(var(x) + epsilon) + bias`.

    Vaswani et al. 2017, arXiv:1706.03762; the norm on the embedding: BERT (Devlin et al. 2018, arXiv:1810.04805). The
    head reads the last state without a further norm. Initial values are ordinary.
    """

    name: ClassVar[str] = "post_layer_norm"
    title: ClassVar[str] = "Post-LN, LayerNorm"

    epsilon: Fraction = 1e-12  # epsilon of the norm

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        return Affine(width)

    def ends(self, width: int, embedding_std: float, rngs: nnx.Rngs) -> nnx.Module:
        return Affine(width)

    def open(self, embedding, at: Boundary, ends) -> Float[Array, "B T D"]:
        return self.normalise(embedding, ends)

    def normalise(self, x: Float[Array, "B T D"], own: Affine) -> Float[Array, "B T D"]:
        return layer_norm(x, own.gain[...], own.bias[...], self.epsilon)

    def rebuild(self, residual: Float[Array, "B T D"], at: Boundary, ends) -> Float[Array, "B T D"]:
        return residual
