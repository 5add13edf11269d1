"""The balance decider."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from nagjax.mod.deciders import Decider


@dataclasses.dataclass(frozen=True)
class Balance(Decider):
    """A token's own choice: it runs if the router holds running for at least as likely as skipping.

    A load-balance loss over the two classes makes as many tokens choose to run as run in training. With f the share of
    a sequence's tokens that choose to run, P their mean probability and q the share that runs, it is
    `f P / q + (1 - f) (1 - P) / (1 - q)`: its slope in P is 0 at f = q. This is the loss of Fedus et al. 2021
    (arXiv:2101.03961), with classes weighted as Jin et al. 2024 (arXiv:2410.07348) weight experts that cost nothing.
    This loss tells the router only how many tokens run; that of `aux_loss` also tells it which.
    """

    name: ClassVar[str] = "balance"
    needs_odds: ClassVar[bool] = True

    def loss(self, logits, chosen, real):
        count = jnp.maximum(jnp.sum(real, axis=-1), 1)
        share = lambda of: jnp.sum(of * real, axis=-1) / count  # noqa: E731
        target = jnp.clip(share(chosen), 1.0 / (1 + count), 1.0 - 1.0 / (1 + count))  # a short sequence runs whole
        choosing, likely = share(logits >= 0), share(jax.nn.sigmoid(logits))
        return choosing * likely / target + (1.0 - choosing) * (1.0 - likely) / (1.0 - target)
