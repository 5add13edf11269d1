"""Batched generation from token ids and from texts."""

import operator
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Float

from nagjax.data.tokenizer import special_ids
from nagjax.discovery import nearest
from nagjax.errors import UserError
from nagjax.generate.batching import NOTHING_ENDS, Finished, Writer, rows_of
from nagjax.generate.choose import Sampling
from nagjax.generate.decode import Pass
from nagjax.generate.text import encodable
from nagjax.generate.weights import narrow_model
from nagjax.mod.cuts import check_cuts
from nagjax.model.config import ModelConfig
from nagjax.model.transformer import Transformer
from nagjax.ranges import Count, Natural, NonNegative, Range, Seed, Share, check_value
from nagjax.runs.opening import OpenRun, check_opened

MOST_TOKENS = 64  # new ones, where nobody says how many
OPTIONS = ("temperature", "top_k", "top_p", "min_p", "seed", "slide")  # of `complete`
LISTS = "give a list of token ids for each prompt"

TopP = Annotated[float, Range(gt=0, le=1)]


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    end_of_text: int | None = None,
    ends: Sequence[int] = (),
    slide: bool = False,
    finished: Finished | None = None,
    progress: float = 1.0,
    cuts: Float[Array, " S"] | None = None,
) -> list[list[int]]:
    """Continues every prompt by up to `tokens` token ids; prompts of any lengths go in one batch.

    temperature: 0 takes the likeliest token, deterministically. top_k: draws from so many likeliest tokens, 0 from all.
    top_p: of these, from the smallest set that holds this probability. min_p: of these, from the ones at least so many
    times as likely as the likeliest. seed: what row i draws does not depend on other rows. end_of_text: ends a row and
    is not returned; and an empty prompt begins with it, as a document does in training. ends: further token ids that
    end a row and are not returned, such as the end of a turn. With neither, no row ends early.
    finished: asked every 16 tokens with a row's number and its new ids so far; a true answer ends the row. progress:
    the share of its training the model has behind it. cuts: with Mixture-of-Depths, the average top-k cuts the
    threshold decider compares with.

    slide: prompts and texts may be longer than the context C. The model then sees a window of the text: when it is
    full the oldest C/2 tokens are left out and the rest is read anew, at positions from 0 (not shifted in the cache,
    where keys and values still know of what has left). So of n tokens it sees all up to n = C, and beyond that the last
    C/2 + 1 to C, as many as follow from n alone.

    A prompt is taken as it is: the model reads it as a piece from within a document, unless it begins with
    `end_of_text`. Prompts of like lengths (32, 64, 128, ... tokens) are read together, all are written on together, and
    every 64 tokens rows that are done leave the batch, when it can be halved.

    Returns the new ids of each prompt alone, at most `tokens`, without what ended it.

    Raises UserError: what is no Transformer; a prompt that does not fit the context together with `tokens` and may not
    slide, has an id outside of the vocabulary, or is empty without `end_of_text`; another argument out of its range.
    """
    if not isinstance(model, Transformer):
        raise UserError("model", type(model).__name__, "give a nagjax.Transformer, such as run.model")
    config = model.config
    config.check_causal("generation")
    check_value("tokens", tokens, Count)
    if tokens >= config.context and not slide:
        raise UserError(
            "tokens", tokens, f"give less than the context of {config.context}, or let it slide (slide=True, --slide)"
        )
    for name, value, hint in (("temperature", temperature, NonNegative), ("top_k", top_k, Natural)):
        check_value(name, value, hint)
    check_value("top_p", top_p, TopP, "1 draws from all tokens")
    check_value("min_p", min_p, Share, "0 draws from all tokens")
    check_value("seed", seed, Seed)
    check_value("slide", slide, bool)
    check_value("progress", progress, Share, "the share of the training that lies behind")
    check_value("end_of_text", end_of_text, Natural | None)
    check_value("ends", tuple(ends) if np.iterable(ends) else ends, tuple[Natural, ...])
    if end_of_text is not None:
        config.check_id("end_of_text", end_of_text)
    for i in ends:
        config.check_id("ends", i)
    check_cuts(cuts, config.sublayers)
    if isinstance(prompts, str) or not np.iterable(prompts):
        raise UserError("prompts", prompts, f"{LISTS}; for texts there is complete(run, ...)")
    if not len(prompts):
        return []
    checked = [_checked(prompt, tokens, end_of_text, config, slide) for prompt in prompts]
    graph, params = nnx.split(narrow_model(model))
    rows = rows_of(checked, config.context)
    sampling = Sampling(np.float32(temperature), np.int32(top_k), np.float32(top_p), np.float32(min_p))
    ending = np.array([*([] if end_of_text is None else [end_of_text]), *ends], np.int32)
    fixed = config.mod.active and model.mod.router.draws
    writer = Writer(params, graph, Pass(np.float32(progress), cuts), mesh_of(params), config.context, fixed)
    writer.write(rows, tokens, jax.random.key(seed), sampling, ending if ending.size else NOTHING_ENDS, finished)
    return [row.new for row in rows]


def complete(
    run: OpenRun, prompts: str | Sequence[str], *, tokens: int | None = None, stop: str | Sequence[str] = (), **options
) -> list[str]:
    """The new text behind each prompt; a text alone is one prompt. `options` are `generate`'s: temperature, top_k,
    top_p, min_p, seed, slide.

    tokens: new ones of each row, at most; None: as many as fit the context behind the longest prompt, at most 64.

    stop: a row ends at the first of these texts in what it has written, which is not returned. A text that is a special
    token of the tokenizer stands for that token, too.

    An empty prompt begins a document; others are read as a piece from within one, behind what an imported model
    expects before every text. A row ends with its document, and at what an imported model names as its `eos_token_id`.
    What is not UTF-8, in a prompt or in what the model wrote, is replaced.

    Defaults are those of `generate` (temperature 1, top_p 1); the command's are 0.8 and 0.95. Returns a text for each
    prompt. Raises UserError for what is no opened run, an unknown option, a prompt or `stop` that is no text, and all
    that `generate` raises.
    """
    check_opened(run)
    check_options(options)
    stop = tuple(stop) if np.iterable(stop) and not isinstance(stop, str) else (stop,)
    check_value("stop", stop, tuple[str, ...])
    if "" in stop:
        raise UserError("stop", "", "give a text of at least one character")
    tokenizer, prompts = run.tokenizer, _texts(prompts)
    if tokens is None:
        tokens = fitting_tokens(run, prompts, slide=options.get("slide", False))
    before = [ids.tolist() for ids in tokenizer.encode_batch([encodable(prompt) for prompt in prompts])]
    told = facts_of(run, special_ids(tokenizer, stop))
    if stop:
        text = lambda row, new: _new_text(tokenizer, before[row], new)  # noqa: E731
        told["finished"] = lambda row, new: cut(whole := text(row, new), stop) != whole
    after = generate(run.model, [run.beginning + ids for ids in before], tokens=tokens, **told, **options)
    return [cut(_new_text(tokenizer, *ids), stop) for ids in zip(before, after, strict=True)]


def check_options(options: Mapping[str, Any]) -> None:
    """Raises UserError for an option that texts are not written by."""
    if unknown := sorted(options.keys() - {*OPTIONS}):
        fix = f"{nearest(unknown[0], ('tokens', *OPTIONS))}options: {', '.join(OPTIONS)}"
        raise UserError(unknown[0], options[unknown[0]], fix)


def facts_of(run: OpenRun, ends: Iterable[int] = ()) -> dict[str, Any]:
    """What `generate` is told of a run: where its texts end, at these `ends` too, how far it is trained, its cuts."""
    ending = {"end_of_text": run.tokenizer.end_of_text, "ends": (*run.eos, *ends)}
    return ending | {"progress": run.progress, "cuts": run.mod.get("cuts")}


def fitting_tokens(run: OpenRun, prompts: str | Sequence[str], *, slide: bool = False) -> int:
    """New tokens for which there is room behind the longest of the prompts, at least 1 and at most 64."""
    if slide:
        return MOST_TOKENS
    read = run.tokenizer.encode_batch([encodable(prompt) for prompt in _texts(prompts)])
    longest = max((len(run.beginning) + len(ids) for ids in read), default=0)
    return room_behind(run, max(longest, 1), MOST_TOKENS)  # an empty one has its document's mark


def room_behind(run: OpenRun, length: int, most: int) -> int:
    """New tokens for which there is room behind so many, at least 1 and at most `most`."""
    return min(most, max(run.config.model.context - length, 1))


def _texts(prompts: str | Sequence[str]) -> list[str]:
    if isinstance(prompts, bytes) or not np.iterable(prompts):
        raise UserError("prompts", prompts, "give a text or a list of texts")
    return [prompts] if isinstance(prompts, str) else list(prompts)


def cut(text: str, stop: Sequence[str]) -> str:
    """Up to before the one of these texts that comes first."""
    found = (text.find(one) for one in stop)
    return text[: min((at for at in found if at >= 0), default=len(text))]


def _new_text(tokenizer, before: list[int], after: list[int]) -> str:
    """Decoded behind the prompt where possible: some tokenizers drop the space at the beginning of a text."""
    start, whole = tokenizer.decode(before), tokenizer.decode(before + after)
    return whole[len(start) :] if whole.startswith(start) else tokenizer.decode(after)


def _checked(
    prompt: Sequence[int], tokens: int, end_of_text: int | None, config: ModelConfig, slide: bool
) -> list[int]:
    try:
        ids = [operator.index(i) for i in prompt]
    except TypeError:
        raise UserError("prompt", prompt, LISTS) from None
    if not ids and end_of_text is None:
        raise UserError("prompt", ids, "give at least one token, or end_of_text to begin a document")
    ids = ids or [end_of_text]
    room = config.context - tokens
    if len(ids) > room and not slide:
        fix = f"with {tokens} new ones it exceeds the context of {config.context}: shorten it to {room} tokens"
        if len(ids) < config.context:
            fix += f", or ask for at most {config.context - len(ids)} new ones"
        fix += ", or let it slide (slide=True, --slide)"
        raise UserError("prompt", f"{len(ids)} tokens", fix)
    for i in ids:
        config.check_id("prompt", i)
    return ids


def mesh_of(params: nnx.State) -> Mesh | None:
    """The mesh the parameters are spread over, None on a single device."""
    sharding = jax.tree.leaves(params)[0].sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None
