"""Which sublayers each token of a text runs, and by what angle each of them turns it."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nagjax.console import note
from nagjax.data import Tokenizer
from nagjax.errors import UserError
from nagjax.generate.text import encodable
from nagjax.layers.where import Where
from nagjax.runs.opening import OpenRun, check_opened

MOST_CHARACTERS = 100_000  # read from a file


def token_paths(run: OpenRun, text: str, *, top_k: bool = False) -> dict:
    """Runs the model once over the beginning of `text`, tokenized by `run.encode`, as much as fits into the context.

    Routed tokens are chosen by the run's causal decider, or with `top_k` by capacity as in training. Returns a dict:
    `tokens`, the text token by token, with names for special tokens and parts of characters; `given`, the number of
    tokens of the whole text; `ran` (bool) and `degrees` [S, T], whether the sublayer ran for the token, and the angle
    in degrees by which it turned the token's residual (0 where the token skipped it).

    Text that cannot be encoded as UTF-8 is replaced. Raises UserError for a run that is not opened, for an empty text,
    and for `top_k` without capacities, that is at a calibrated rate or in a run without Mixture-of-Depths.
    """
    check_opened(run)
    if not text:
        raise UserError("text", text, "give at least one character")
    if top_k and run.calibrated:
        raise UserError("top_k", True, "a calibrated run has thresholds only: leave it out")
    if top_k and not run.config.model.mod.active:
        raise UserError("top_k", True, "the run has no Mixture-of-Depths, and every token runs: leave it out")
    whole = run.encode(encodable(text))
    ids = whole[: run.config.model.context]
    graph, params = nnx.split(run.model)
    ran, turn = paths(
        params, jnp.asarray([ids]), run.mod.get("cuts"), np.float32(run.progress), graph=graph, causal=not top_k
    )
    found = {"ran": np.asarray(ran)[:, 0], "degrees": np.degrees(np.asarray(turn)[:, 0])}
    return {"tokens": [_piece(run.tokenizer, i) for i in ids], "given": len(whole), **found}


def _piece(tokenizer: Tokenizer, i: int) -> str:
    """A token's text, or its name if it has no text of its own: a special token, or a part of a character's bytes."""
    text = tokenizer.decode([i])
    return text if text and "\ufffd" not in text else tokenizer.name_of(i) or text


@functools.partial(jax.jit, static_argnames=("graph", "causal"))
def paths(params, tokens, cuts, progress, *, graph, causal):
    """One pass over whole rows of tokens [B, T]: which sublayers each token ran, and the angle in radians by which each
    turned it; both [S, B, T]."""
    model = nnx.merge(graph, params)
    options = {"cuts": cuts, "causal": causal, "progress": progress, "mapped": True}
    found = model(tokens, Where.whole(*tokens.shape), **options).paths
    return found["ran"], found["turn"]


def read_text(text: str | None, file: Path | None) -> str:
    """The text given, or the beginning of a file; if a file is cut, a note says so. Raises UserError unless exactly one
    of the two is given and can be read."""
    if (text is None) == (file is None):
        raise UserError("text", text, "give either --text or --file")
    if text is not None:
        return text
    try:
        with file.open(encoding="utf-8", errors="replace") as stream:
            read = stream.read(MOST_CHARACTERS)
            if stream.read(1):
                note(f"read the first {MOST_CHARACTERS:,} characters of {file}")
            return read
    except OSError as error:
        raise UserError("file", str(file), f"cannot be read ({error.strerror})") from None
