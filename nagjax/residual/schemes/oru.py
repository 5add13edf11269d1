"""Orthogonal residual updates: the part of an update along the residual is removed."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from nagjax.ranges import Fraction
from nagjax.residual.prenorm import PreNormStream
from nagjax.residual.protocol import Boundary
from nagjax.residual.schemes.plain import Plain


@dataclasses.dataclass(frozen=True)
class ORU(Plain):
    """`h <- h + u - (<h, u> / (<h, h> + epsilon)) h`, `u = f_l(RMSNorm_l(h))`: only the orthogonal part is written.

    Oh et al. 2025, "Revisiting Residual Connections: Orthogonal Updates for Stable and Efficient Deep Networks",
    arXiv:2505.11881, in the feature-wise form: the products are taken per token, over its features. The paper tests it
    on vision models. The residual's length never shrinks: `|h'|^2 = |h|^2 + |u_perp|^2` up to epsilon.

    Choices where the source is silent: initial values and norm are those of `plain`; products and lengths are float32.
    """

    name: ClassVar[str] = "oru"
    title: ClassVar[str] = "orthogonal updates"
    learning_rate: ClassVar[float] = 8e-3  # plain's; not tuned

    epsilon: Fraction = 1e-6  # epsilon of the norm and of the projection

    def advance(self, stream: PreNormStream, update, at: Boundary):
        h, u = stream.hidden.astype(jnp.float32), update.astype(jnp.float32)
        along = jnp.sum(h * u, axis=-1, keepdims=True) / (jnp.sum(h**2, axis=-1, keepdims=True) + self.epsilon)
        hidden = (h + u - along * h).astype(stream.hidden.dtype)
        return PreNormStream(hidden, self.normalise(hidden, at)), jnp.ones((1, 1, 1), jnp.float32)
