"""The task of a bidirectional model on a text: predicting the tokens behind masks."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from nagjax.data.tokenizer import JsonTokenizer, Tokenizer
from nagjax.errors import UserError
from nagjax.train.loss import Batch

SHARE = 0.15  # of the tokens are masked
MASKS = ("[MASK]", "<mask>")


class MaskedBatch(Batch):
    """A batch whose targets are its own tokens. The masked tokens count in the loss (`weights`), all tokens in measures
    (`counted`)."""

    @property
    def counted(self) -> Bool[Array, "B T"]:
        return self.segment_ids > 0


def masked(batch: Batch, tokenizer: Tokenizer, seed: int = 0) -> MaskedBatch:
    """The batch with its own tokens as targets, and a random 15% of the tokens inside documents (at least one) replaced
    by the mask, always the same ones for a seed. All chosen tokens are masked, whereas training leaves or changes some
    (Devlin et al. 2018, arXiv:1810.04805). A document's first token becomes the one that the tokenizer puts at the
    start of a text.

    Raises UserError for a tokenizer without a mask token.
    """
    mask = tokenizer.first_of(MASKS) if isinstance(tokenizer, JsonTokenizer) else None
    if mask is None:
        raise UserError("tokenizer", tokenizer.name, f"has no mask, {' or '.join(MASKS)}: bring the model's own back")
    first, real = batch.positions == 0, batch.segment_ids > 0
    tokens = jnp.where(first, tokenizer.in_front[0], batch.tokens) if tokenizer.in_front else batch.tokens
    inside = real & ~first & (tokens != tokenizer.end_of_text)
    drawn = jnp.where(inside, jax.random.uniform(jax.random.key(seed), tokens.shape), 1.0)
    count = jnp.ceil(SHARE * jnp.sum(inside)).astype(jnp.int32)
    hidden = inside & (drawn < jnp.sort(drawn, axis=None)[count])
    weights = hidden.astype(jnp.float32)
    return MaskedBatch(jnp.where(hidden, mask, tokens), tokens, batch.segment_ids, batch.positions, weights)
