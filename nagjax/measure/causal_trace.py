"""Causal tracing: which token's residual, at which depth, carries what a prediction needs (Meng et al. 2022, ROME,
arXiv:2202.05262, Section 2; by depth in Liu et al. 2026, arXiv:2602.05970, Figure 6).

Noise on the embeddings of the subject's tokens makes the subject unreadable. Then the stream of one token at one depth
is restored to its value without the noise. The gain in the answer's probability is the indirect effect of this place.
"""

import functools
import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from nagjax.errors import UserError
from nagjax.generate.text import encodable
from nagjax.layers.where import Where
from nagjax.measure.cuts import forward_options
from nagjax.measure.interventions import through
from nagjax.model.transformer import BlockCall, Intervention, Output, Transformer
from nagjax.ranges import Count, Positive, Seed, check_value
from nagjax.residual import Stream
from nagjax.residual.sublayer import kept
from nagjax.runs.opening import OpenRun, check_opened, check_text

ROWS = 512  # sequences of a batch, at most

Subject = slice | Sequence[int]


class Trace(NamedTuple):
    """Probabilities of the token `answer` after a prompt of T tokens, in a model of L blocks.

    clean: without noise. corrupted: with noise on the embeddings of the tokens `subject` (from, to before), mean over
    the draws. restored: with the stream of one token restored before one block (last row: after the last block). It
    equals `corrupted` for tokens before the subject, and is NaN for later tokens that were left out. tokens: the pieces
    of the prompt's text, if it was given as text.
    """

    clean: float
    corrupted: float
    restored: Float[np.ndarray, "L+1 T"]
    answer: int
    subject: tuple[int, int]
    tokens: tuple[str, ...] = ()

    @property
    def effect(self) -> Float[np.ndarray, "L+1 T"]:
        """The indirect effect of every place: `restored - corrupted`."""
        return self.restored - self.corrupted

    @property
    def ends(self) -> Float[np.ndarray, "L+1 2"]:
        """The indirect effects of the subject's last token and of the prompt's last token."""
        return self.effect[:, [self.subject[1] - 1, -1]]


class Summary(NamedTuple):
    """Mean indirect effects by depth at the subject's last token and at the prompt's last, and `handover`."""

    subject: Float[np.ndarray, " L+1"]
    last: Float[np.ndarray, " L+1"]
    handover: float


def summary(traces: Sequence[Trace]) -> Summary:
    """The summary of traces of one model. Raises UserError if there are none."""
    if not traces:
        raise UserError("traces", 0, "give at least one")
    subject, last = np.mean([own.ends for own in traces], axis=0).T
    return Summary(subject, last, handover(subject, last))


def handover(subject: Float[np.ndarray, " L+1"], last: Float[np.ndarray, " L+1"]) -> float:
    """The depth, as a share of the blocks, from which on the last token's effect exceeds the subject's; NaN if it does
    not do so at the end. At the latest it is 1, after the last block, where only the last token is read."""
    behind = np.flatnonzero(~(np.asarray(last) > np.asarray(subject)))
    first, blocks = (behind[-1] + 1 if behind.size else 0), len(last) - 1
    return float(first / blocks) if first <= blocks else math.nan


def trace(
    run: OpenRun,
    ids: Sequence[int],
    subject: Subject,
    answer: int | None = None,
    *,
    noise: float = 3.0,
    draws: int = 10,
    seed: int = 0,
    places: Sequence[int] | None = None,
) -> Trace:
    """Traces one prompt of token ids, which the model reads as it is, as one document.

    subject: a slice of the prompt's tokens, or the pair (from, to before). answer: a token id; None: the likeliest one.
    noise: standard deviation of the normal noise, relative to that of the elements of the subject's rows in the
    embedding table. draws, seed: the number of draws of the noise, over which results are averaged, and their seed.
    places: tokens whose stream is restored; by default all from the subject's first one on, none if empty. Tokens
    before the subject hold no noise, so restoring them would change nothing.

    All residual schemes are traced alike: the token's whole stream is restored, not only its residual. In a routed
    model the noise changes which tokens run; if a router looks at other tokens, it also changes this for tokens without
    noise.

    Raises UserError for an encoder; a router that draws by row; ids, a subject, an answer or places that do not exist;
    a prompt longer than the context; and `noise`, `draws` or `seed` out of range.
    """
    check_opened(run)
    config = run.config.model
    config.check_causal("a causal trace")
    check_value("noise", noise, Positive)
    check_value("draws", draws, Count)
    check_value("seed", seed, Seed)
    if config.mod.active and run.model.mod.router.draws:
        fix = "draws anew for every row of a batch, so rows would differ even without noise"
        raise UserError("mod.router", run.model.mod.router.name, fix)
    tokens = _checked(run, ids)
    start, stop = _span(subject, len(tokens))
    if answer is not None:
        config.check_id("answer", _whole("answer", answer))
    chosen = _places(places, start, len(tokens))

    random = np.random.default_rng(seed).standard_normal((draws, stop - start, config.width), np.float32)
    spread = float(np.std(np.asarray(run.model.embedding.tokens[...][tokens[start:stop]], np.float32)))
    added = np.zeros((draws, len(tokens), config.width), np.float32)
    added[:, start:stop] = noise * spread * random

    depths = config.depth + 1
    never = [(depths, 0, draw) for draw in range(draws)]
    cells = [(depth, place, draw) for depth in range(depths) for place in chosen for draw in range(draws)]
    clean, found, answer = _asked(run, tokens, added, np.array([*never, *cells], np.int32), answer)
    corrupted = float(np.mean(found[:draws]))
    restored = np.full((depths, len(tokens)), np.nan)
    restored[:, :start] = corrupted
    restored[:, chosen] = np.mean(found[draws:].reshape(depths, len(chosen), draws), axis=-1)
    return Trace(clean, corrupted, restored, answer, (start, stop))


def trace_text(run: OpenRun, prompt: str, subject: str, answer: str | None = None, **options: Any) -> Trace:
    """Traces a text, which is encoded as `nagjax.generate.sample.complete` encodes a prompt. `options` are those of
    `trace`.

        trace_text(nagjax.load(FOLDER), "The space needle is in downtown", "space needle", " Seattle")

    subject: a part of the prompt, at its first occurrence; a token that overlaps it belongs to it. answer: a text that
    follows the prompt, of which the first token counts; None: the token that the model finds likeliest.

    Raises UserError for what `trace` refuses; a subject that does not occur in the prompt; an answer that is empty, or
    whose first letter would share the prompt's last token; and a prompt that spells a special token.
    """
    check_opened(run)
    run.config.model.check_causal("a causal trace")
    prompt, subject = encodable(prompt), encodable(subject)
    at = prompt.find(subject)
    if at < 0 or not subject:
        raise UserError("subject", subject, f"give a part of the prompt, {prompt!r}")
    ids, (read,) = run.encode(prompt), run.tokenizer.encode_templated([prompt])
    front = len(run.beginning)
    if read.ids.tolist() != ids[front:]:
        fix = "spells a special token, whose place is not known: give trace() the token ids"
        raise UserError("prompt", prompt, fix)
    inside = np.flatnonzero((read.starts < at + len(subject)) & (read.stops > at))
    if not inside.size:
        raise UserError("subject", subject, "has no token of its own: the tokenizer leaves it out")
    following = None if answer is None else _following(run, prompt, ids, answer)
    found = trace(run, ids, (front + int(inside[0]), front + int(inside[-1]) + 1), following, **options)
    pieces = (prompt[first:last] for first, last in zip(read.starts, read.stops, strict=True))
    return found._replace(tokens=(*map(run.tokenizer.name_of, ids[:front]), *pieces))


def _following(run: OpenRun, prompt: str, ids: list[int], answer: str) -> int:
    """The first token of the answer after the prompt."""
    check_text(answer)
    whole = run.encode(prompt + encodable(answer))
    if not answer:
        raise UserError("answer", answer, "give a text, or leave it out for what the model finds likeliest")
    if whole[: len(ids)] != ids or len(whole) == len(ids):
        fix = "joins the prompt's last token: end the prompt before a space and begin the answer with it"
        raise UserError("answer", answer, fix)
    return whole[len(ids)]


def last_logits(model: Transformer, output: Output) -> Float[Array, "B V"]:
    """Float32 logits after the last token of each row."""
    last = output._replace(hidden=output.hidden[:, -1:], log_scale=output.log_scale[:, -1:])
    return model.logits(last)[:, 0]


class _Noised(nnx.Module):
    """An embedding whose output has something added to it; all else is the embedding's own."""

    def __init__(self, embedding: nnx.Module, added: Float[Array, "B T D"]):
        self.embedding, self.added = embedding, nnx.data(added)

    @property
    def tokens(self) -> Any:
        return self.embedding.tokens

    def __call__(self, tokens, where: Where, dtype, types=None) -> Float[Array, "B T D"]:
        return (self.embedding(tokens, where, jnp.float32, types) + self.added).astype(dtype)


def _restoring(place: Int[Array, " B"], token: Int[Array, " B"]) -> Intervention:
    """Restores one token of every row to row 0's stream, before the block with the number `place` (the number of
    blocks: after the last block); any other number changes nothing."""

    def restored(stream: Stream, depth) -> Stream:
        rows, count = jax.tree.leaves(stream)[0].shape[:2]
        here = (place == depth)[:, None] & (token[:, None] == jnp.arange(count))
        clean = jax.tree.map(lambda x: jnp.broadcast_to(x[:1], (rows, *x.shape[1:])), stream)
        return jax.tree.map(kept(here), clean, stream)

    def intervene(model: Transformer, stream, call: BlockCall):
        block, last = call.layer.block_index, model.config.depth
        after = through(model, restored(stream, block), call)
        return restored(after, jnp.where(block == last - 1, last, -1)), ()

    return intervene


@functools.partial(jax.jit, static_argnames=("graph", "causal"))
def _pass(params, tokens, added, cells, answer, progress, cuts, *, graph, causal):
    """log p(answer) in the clean row and in the others [N], and the answer: the clean row's likeliest token if `answer`
    is below 0. `cells` [N, 3]: the depth and the token where the stream is restored, and the draw of the noise."""
    model = nnx.merge(graph, params)
    cells = jnp.concatenate([jnp.full((1, 3), -1, jnp.int32), cells])
    noise = jnp.concatenate([jnp.zeros_like(added[:1]), added])[cells[:, 2] + 1]
    model.embedding = _Noised(model.embedding, noise)
    rows = jnp.broadcast_to(tokens, (len(cells), len(tokens)))
    restoring = _restoring(cells[:, 0], cells[:, 1])
    output = model(rows, intervene=restoring, progress=progress, cuts=cuts, causal=causal)
    log_p = jax.nn.log_softmax(last_logits(model, output))
    answer = jnp.where(answer < 0, jnp.argmax(log_p[0]), answer)
    return log_p[0, answer], log_p[1:, answer], answer


def _asked(
    run: OpenRun,
    tokens: Int[np.ndarray, " T"],
    added: Float[np.ndarray, "draws T D"],
    cells: Int[np.ndarray, "N 3"],
    answer: int | None,
) -> tuple[float, Float[np.ndarray, " N"], int]:
    """p(answer) of the clean prompt and of every cell, and the answer. Compiles one program for each length of a prompt
    and size of a batch."""
    graph, params = nnx.split(run.model)
    options, chosen = forward_options(run), np.int32(-1 if answer is None else answer)
    values, causal = (np.float32(options["progress"]), options["cuts"]), options["causal"]
    count = -(-len(cells) // (ROWS - 1))
    size = -(-len(cells) // count)
    never = np.full((count * size - len(cells), 3), (run.config.model.depth + 1, 0, 0), np.int32)
    parts = np.concatenate([cells, never]).reshape(count, size, 3)
    found = [_pass(params, tokens, added, part, chosen, *values, graph=graph, causal=causal) for part in parts]
    clean, others, answers = (np.stack(own) for own in zip(*jax.device_get(found), strict=True))
    return float(np.exp(clean[0])), np.exp(others.ravel()[: len(cells)], dtype=np.float64), int(answers[0])


def _checked(run: OpenRun, ids: Sequence[int]) -> Int[np.ndarray, " T"]:
    config = run.config.model
    tokens = [_whole("ids", i) for i in ids] if np.iterable(ids) and not isinstance(ids, str) else []
    if not 0 < len(tokens) <= config.context:
        raise UserError("ids", f"{len(tokens)} tokens", f"give a list of 1 to {config.context} token ids, the context")
    for i in tokens:
        config.check_id("ids", i)
    return np.array(tokens, np.int32)


def _whole(field: str, value: Any) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise UserError(field, value, "give a token id, a whole number") from None


def _span(subject: Subject, count: int) -> tuple[int, int]:
    """The index of the subject's first token, and the index after its last."""
    fix = f"give two places, (from, to before), of a prompt that has {count} tokens: 0 <= from < to <= {count}"
    if isinstance(subject, slice):
        start, stop = subject.start or 0, count if subject.stop is None else subject.stop
        pair: tuple = (start, stop) if subject.step in (None, 1) else ()
    else:
        pair = tuple(subject) if np.iterable(subject) else ()
    try:
        start, stop = map(operator.index, pair)
    except (TypeError, ValueError):
        raise UserError("subject", subject, fix) from None
    if not 0 <= start < stop <= count:
        raise UserError("subject", subject, fix)
    return start, stop


def _places(places: Sequence[int] | None, start: int, count: int) -> list[int]:
    """The tokens to restore."""
    if places is None:
        return list(range(start, count))
    chosen = sorted({_whole("places", place) for place in places})
    if chosen and not start <= chosen[0] <= chosen[-1] < count:
        fix = f"name tokens from the subject's first on, {start} to {count - 1}; before it all is as it was"
        raise UserError("places", list(places), fix)
    return chosen
