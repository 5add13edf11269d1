"""Mixture-of-Experts: an MLP of several experts, of which every token runs a few.

    s = softmax(x W_r) or sigmoid(x W_r)            scores, float32
    chosen = the `active` highest of s + b          b: balancing biases, without a gradient (0 without them)
    update = shared(x) + sum over chosen of w_i expert_i(x),    w = s of the chosen, divided by their sum if normalised

Shazeer et al. 2017, arXiv:1701.06538; shared experts: DeepSeekMoE, arXiv:2401.06066; balancing: `balance.py`. The first
`experts` options are experts and the others run nothing: Mixture-of-Depths integrated into the choice (Raposo et al.
2024, arXiv:2404.02258). Padding is neither routed nor counted.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from nagjax.layers.branch import Update
from nagjax.layers.config import GATED, MoEConfig
from nagjax.layers.dispatch import Matrices, run_experts
from nagjax.layers.extra_columns import extra_columns
from nagjax.layers.linear import linear, linears_then
from nagjax.layers.mlp import opened
from nagjax.layers.parameters import Scales, bias, matrix
from pallas_kernels.placement import current_placement, on_shards


class Choices(NamedTuple):
    """The choices of every token (an id of `experts` or more runs nothing), and their weights, float32."""

    ids: Int[Array, "B T A"]
    weights: Float[Array, "B T A"]


class Experts(nnx.Module):
    """The branch. At the start its update has the variance of one MLP with the hidden features of all experts that a
    token runs: the initial down projection of a chosen expert is enlarged to make up for the expert's weight. With
    `weights` "score" the weights are not known in advance; then the experts' part starts smaller by the scores."""

    def __init__(self, width: int, config: MoEConfig, kind: str, scales: Scales, rngs: nnx.Rngs):
        self.config, self.kind = config, kind
        hidden, many, run = config.hidden or 0, config.experts, config.active + config.shared
        weighed = config.active if config.weights == "normalised" else 1
        gated = kind in GATED
        self.router = matrix(rngs, (width, many + config.skips), ("embed", None))
        self.balance = bias(many + config.skips, None) if config.bias_rate else None
        inward, outward = ("experts", "embed", "mlp"), ("experts", "mlp", "embed")
        self.gate = matrix(rngs, (many, width, hidden), inward) if gated else None
        self.up = matrix(rngs, (many, width, hidden), inward, scales.inner)
        self.down = matrix(rngs, (many, hidden, width), outward, scales.output * weighed * run**-0.5)
        common = config.shared * hidden
        part = (config.shared / run) ** 0.5  # the shared experts' share of the update's standard deviation
        self.shared_gate = matrix(rngs, (width, common), ("embed", "mlp")) if common and gated else None
        self.shared_up = matrix(rngs, (width, common), ("embed", "mlp"), scales.inner) if common else None
        self.shared_down = matrix(rngs, (common, width), ("mlp", "embed"), scales.output * part) if common else None

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        """The update of tokens without padding; no token is dropped."""
        return self.choose(x, jnp.ones(x.shape[:2], bool), lossless=True).value

    def choose(self, x: Float[Array, "B T D"], real: Bool[Array, "B T"], *, lossless: bool) -> Update:
        """The update, which tokens ran anything (None: all), and notes, float32 sums over the real tokens of each
        sequence.

        load [B, n] and score [B, n]: choices and shares of the scores by option (experts, then skips); z [B]: squared
        logsumexp of the logits; dropped [B]: choices that found no room; tokens [B]. lossless: run dropless, whatever
        the config.
        """
        config = self.config
        with jax.named_scope("routing"):
            # by default a TPU multiplies float32 in bfloat16
            logits = jnp.matmul(x.astype(jnp.float32), self.router[...], precision="highest")
            scores = jax.nn.softmax(logits) if config.score == "softmax" else jax.nn.sigmoid(logits)
            chosen = choose(scores, real, None if self.balance is None else self.balance[...], self.config)
        activation = functools.partial(opened, self.kind)
        cast = lambda weight: weight[...].astype(x.dtype)  # noqa: E731
        matrices = Matrices(None if self.gate is None else cast(self.gate), cast(self.up), cast(self.down))
        with jax.named_scope("experts"):
            room = None if lossless or config.dispatch == "dropless" else config.capacity
            done, dropped = run_experts(x, chosen.ids, chosen.weights, matrices, activation, room, scores.shape[-1])
        if self.shared_up is not None and self.shared_down is not None:
            with jax.named_scope("shared"):
                maps = [(weight, None) for weight in (self.shared_gate, self.shared_up) if weight is not None]
                inner = linears_then(activation, x, *maps, extra=extra_columns(x))
                done = done + linear(inner, self.shared_down, None)
        ran = None
        if config.skips and not config.shared:
            ran = jnp.any(chosen.ids < config.experts, axis=-1) | ~real
        return Update(done, None, ran, self._notes(logits, scores, chosen.ids, real, dropped))

    def _notes(self, logits, scores, ids, real, dropped) -> dict[str, Float[Array, "B ..."]]:
        counted = real.astype(jnp.float32)
        shares = scores / jnp.sum(scores, axis=-1, keepdims=True)
        return {
            "load": jnp.sum(jax.nn.one_hot(ids, scores.shape[-1]), axis=(1, 2)),  # one_hot of padding's id is all zeros
            "score": jnp.einsum("bt,bte->be", counted, shares),
            "z": jnp.sum(counted * jax.nn.logsumexp(logits, axis=-1) ** 2, axis=-1),
            "dropped": dropped,
            "tokens": jnp.sum(counted, axis=-1),
        }


def choose(
    scores: Float[Array, "B T n"], real: Bool[Array, "B T"], balance: Float[Array, " n"] | None, config: MoEConfig
) -> Choices:
    """The choices of each token; padding gets the id n, which no expert has. On a mesh each device chooses for its own
    tokens: XLA's partitioners would gather all scores for a top-k."""

    def own(scores, real, balance):
        preferred = jax.lax.stop_gradient(scores if balance is None else scores + balance)
        ids = jax.lax.top_k(preferred, config.active)[1].astype(jnp.int32)
        weights = jnp.take_along_axis(scores, ids, axis=-1)
        if config.weights == "normalised":
            weights = weights / (jnp.sum(weights, axis=-1, keepdims=True) + 1e-20)
        return jnp.where(real[..., None], ids, scores.shape[-1]), weights

    return Choices(*on_shards(own, current_placement(), (2, 2, None), (2, 2))(scores, real, balance))
