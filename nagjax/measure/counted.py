"""Means over the counted tokens of several batches."""

from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from nagjax.data import DataConfig
from nagjax.data.shares import among, mean_shares, parse_mix
from nagjax.errors import UserError
from nagjax.train.evaluator import corpus_of
from nagjax.train.loss import Batch


def first_of_each(batches: Sequence[Batch], count: int) -> list[Batch]:
    """The first `count` batches, and the first batch of each corpus that has none among these."""
    chosen = list(batches[:count])
    for batch in batches[count:]:
        if corpus_of(batch) not in {corpus_of(own) for own in chosen}:
            chosen.append(batch)
    return chosen


def scales(data: DataConfig, batches: Sequence[Batch], counts: Float[np.ndarray, " N"]) -> Float[np.ndarray, " N"]:
    """The weight of a token of each batch in a mean over all of them, on average 1. Every corpus of a mixture has the
    share that its rows have in training, among the corpora in these batches, as in `nagjax.train.evaluator.Evaluator`.

    counts: number of tokens of each batch. Raises UserError if all batches of a corpus have none.
    """
    corpora = np.array([corpus_of(batch) for batch in batches])
    there = sorted({*corpora.tolist()})
    tokens = [float(np.sum(counts, where=corpora == corpus)) for corpus in there]
    if 0.0 in tokens:
        of = f" of {data.mix[there[tokens.index(0.0)]]}" if len(there) > 1 else ""
        raise UserError("batches", len(batches), f"no target{of} in these batches counts: give more of them")
    if len(there) == 1:
        return np.ones(len(batches))
    shares = np.array(among(mean_shares(parse_mix(data.mix)), there))
    by_corpus = dict(zip(there, shares * sum(tokens) / tokens, strict=True))
    return np.array([by_corpus[corpus] for corpus in corpora.tolist()])


def mean(values: Float[np.ndarray, "N *x"], tokens: Float[np.ndarray, "N *#y"]) -> Float[np.ndarray, " *x"]:
    """The mean over all tokens, from the means of the batches and their numbers of tokens; NaN if there are no
    tokens."""
    values = np.asarray(values, np.float64)
    tokens = np.asarray(tokens, np.float64).reshape(*tokens.shape, *(1,) * (values.ndim - tokens.ndim))
    total = np.sum(np.where(tokens > 0, tokens * values, 0.0), axis=0)
    count = np.broadcast_to(tokens.sum(axis=0), total.shape)
    return np.divide(total, count, out=np.full(total.shape, np.nan), where=count > 0)


def most_counted(counted: Bool[Array, "B T"], rows: int) -> Int[Array, " b"]:
    """The indices of the sequences with the most counted tokens, at most `rows` of them, in ascending order."""
    order = jnp.argsort(-jnp.sum(counted, axis=1, dtype=jnp.int32), stable=True)
    return jnp.sort(order[:rows])
