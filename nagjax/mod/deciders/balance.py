"""The balance decider."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from nagjax.mod.deciders import Decider


@dataclasses.dataclass(frozen=True)
class Balance(Decider):
    """A token's own choice: it runs where the router holds running for at least as likely as skipping.

    That as many choose so as run in training is the work of a load-balance loss over the two classes. With f the share
    of a sequence's tokens that choose to run, P their mean probability and q the share that runs, it is `f P / q +
    (1 - f) (1 - P) / (1 - q)`: its slope in P is 0 at f = q. The loss of Fedus et al. 2021 (arXiv:2101.03961), with
    classes weighted as Jin et al. 2024 (arXiv:2410.07348) weigh experts that cost nothing. Who runs is not told to the
    router, only how many: `aux_loss` tells both.
    """

    name: ClassVar[str] = "balance"
    needs_odds: ClassVar[bool] = True

    def loss(self, logits, chosen, real):
        count = jnp.maximum(jnp.sum(real, axis=-1), 1)
        share = lambda of: jnp.sum(of * real, axis=-1) / count  # noqa: E731
        target = jnp.clip(share(chosen), 1.0 / (1 + count), 1.0 - 1.0 / (1 + count))  # a short sequence runs whole
        choosing, likely = share(logits >= 0), share(jax.nn.sigmoid(logits))
        return choosing * likely / target + (1.0 - choosing) * (1.0 - likely) / (1.0 - target)
