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

MOST_TOKENS = 64  # default for the number of new tokens
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
    """Continues every prompt by up to `tokens` token ids; prompts of any lengths share one batch.

    temperature: 0 takes the likeliest token, deterministically. top_k: draws from this many likeliest tokens, 0 from
    all. top_p: of these, from the smallest set that holds this probability. min_p: of these, from the tokens at least
    this many times as likely as the likeliest. seed: row i draws the same tokens whatever the other rows are.
    end_of_text: ends a row and is not returned; an empty prompt begins with it, as a document does in training. ends:
    further token ids that end a row and are not returned, such as the end of a turn. With neither, no row ends early.
    finished: called every 16 tokens with a row's number and its new ids so far; a true result ends the row. progress:
    the share of the training that the model has completed. cuts: with Mixture-of-Depths, the average top-k cuts [S],
    with which the threshold decider compares.

    slide: prompts and texts may be longer than the context C. The model then sees a window of the text: whenever it is
    full, the oldest C/2 tokens are dropped and the rest is read anew at positions from 0. (The cache is not shifted,
    because its keys and values depend on the tokens that were dropped.) So of n tokens the model sees all if n <= C,
    and else the last C/2 + 1 to C, how many depending only on n.

    A prompt is read as a piece from within a document, unless it begins with `end_of_text`. Prompts of similar lengths
    (32, 64, 128, ... tokens) are read together, and all rows are generated together. Every 64 tokens, rows that are
    done leave the batch if it can be halved.

    Returns for each prompt its new ids alone, at most `tokens`, without the token that ended it.

    Raises UserError if `model` is not a Transformer; for a prompt that together with `tokens` exceeds the context
    without `slide`, contains an id outside the vocabulary, or is empty without `end_of_text`; and for any other
    argument out of its range.
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
    ends = tuple(ends) if np.iterable(ends) else ends
    check_value("ends", ends, tuple[Natural, ...])
    if end_of_text is not None:
        config.check_id("end_of_text", end_of_text)
    for i in ends:
        config.check_id("ends", i)
    check_cuts(cuts, config.sublayers)
    if isinstance(prompts, str) or not np.iterable(prompts):
        raise UserError("prompts", prompts, f"{LISTS}; for texts there is complete(run, ...)")
    prompts = list(prompts)
    if not prompts:
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
    """The new text behind each prompt; a single text is one prompt. `options` are those of `generate`: temperature,
    top_k, top_p, min_p, seed, slide.

    tokens: the most new tokens of each row; None: as many as fit the context behind the longest prompt, at most 64.

    stop: a row ends at the first of these texts in its new text, which is not returned. If a text is a special token of
    the tokenizer, the row also ends at that token.

    An empty prompt begins a document. Other prompts are read as a piece from within a document, behind the tokens that
    an imported model expects before every text. A row ends with its document, and at an imported model's
    `eos_token_id`. Text that cannot be encoded as UTF-8 is replaced, in prompts and in what the model generates.

    Defaults are those of `generate` (temperature 1, top_p 1); the command's are 0.8 and 0.95. Returns one text per
    prompt. Raises UserError if `run` is not an opened run, for an unknown option, if a prompt or `stop` is not a text,
    and for whatever `generate` raises.
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
    """Raises UserError for an option that `complete` does not have."""
    if unknown := sorted(options.keys() - {*OPTIONS}):
        fix = f"{nearest(unknown[0], ('tokens', *OPTIONS))}options: {', '.join(OPTIONS)}"
        raise UserError(unknown[0], options[unknown[0]], fix)


def facts_of(run: OpenRun, ends: Iterable[int] = ()) -> dict[str, Any]:
    """The arguments of `generate` that follow from a run: the ids that end its texts (with `ends` among them), the
    share of its training done, and its cuts."""
    ending = {"end_of_text": run.tokenizer.end_of_text, "ends": (*run.eos, *ends)}
    return ending | {"progress": run.progress, "cuts": run.mod.get("cuts")}


def fitting_tokens(run: OpenRun, prompts: str | Sequence[str], *, slide: bool = False) -> int:
    """The number of new tokens that fit the context behind the longest prompt, at least 1 and at most 64; with `slide`
    64."""
    if slide:
        return MOST_TOKENS
    read = run.tokenizer.encode_batch([encodable(prompt) for prompt in _texts(prompts)])
    longest = max((len(run.beginning) + len(ids) for ids in read), default=0)
    return room_behind(run, max(longest, 1), MOST_TOKENS)  # an empty prompt gets the token that begins a document


def room_behind(run: OpenRun, length: int, most: int) -> int:
    """The number of new tokens that fit the context behind `length` tokens, at least 1 and at most `most`."""
    return min(most, max(run.config.model.context - length, 1))


def _texts(prompts: str | Sequence[str]) -> list[str]:
    if isinstance(prompts, bytes) or not np.iterable(prompts):
        raise UserError("prompts", prompts, "give a text or a list of texts")
    return [prompts] if isinstance(prompts, str) else list(prompts)


def cut(text: str, stop: Sequence[str]) -> str:
    """The text up to the first occurrence of any of the `stop` texts."""
    found = (text.find(one) for one in stop)
    return text[: min((at for at in found if at >= 0), default=len(text))]


def _new_text(tokenizer, before: list[int], after: list[int]) -> str:
    """The text of the new tokens. If possible it is decoded behind the prompt, because some tokenizers drop a space at
    the beginning of a text."""
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
    """The mesh that the parameters are spread over; None on a single device."""
    sharding = jax.tree.leaves(params)[0].sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None
