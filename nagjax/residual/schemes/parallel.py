"""Parallel branches: attention and MLP of a block read the same residual."""

import dataclasses
from typing import ClassVar

import jax.numpy as jnp

from nagjax.residual.prenorm import PreNormStream
from nagjax.residual.protocol import Boundary
from nagjax.residual.schemes.layer_norm import LayerNorm


@dataclasses.dataclass(frozen=True)
class Parallel(LayerNorm):
    """`h <- h + attention(LN_1(h)) + mlp(LN_2(h))`: GPT-NeoX (Black et al. 2022, arXiv:2204.06745, Section 2.1); GPT-J
    has one norm for both.

    Attention's update enters the residual at once; the MLP still reads the normalised residual from before attention. A
    last branch without a partner is added as in pre-norm. Between attention and MLP the residual does not determine
    what the MLP reads: use `rebuild` only at the ends of blocks.
    """

    name: ClassVar[str] = "parallel"
    title: ClassVar[str] = "parallel branches"

    def advance(self, stream: PreNormStream, update, at: Boundary):
        hidden = stream.hidden + update.astype(stream.hidden.dtype)
        read = jnp.where(at.ends_block, hidden, stream.hidden)  # the MLP reads what attention has read
        return PreNormStream(hidden, self.normalise(read, at)), jnp.ones((1, 1, 1), jnp.float32)
