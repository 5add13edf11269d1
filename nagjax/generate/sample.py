"""Batched generation: the prompts in one pass, then the whole loop over new tokens on the device."""

import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int, UInt32

from nagjax.errors import UserError
from nagjax.generate.choose import choose
from nagjax.layers.embedding import unembed
from nagjax.layers.where import Where
from nagjax.model.config import ModelConfig
from nagjax.model.transformer import Transformer
from nagjax.runs.opening import OpenRun
from nagjax.train.distributed.mesh import BATCH, pin_rows
from pallas_kernels.placement import shard_rows

PROMPT_STEP = 32  # prompts are padded to a multiple of it: a new length seldom compiles anew
NO_TOKEN = -1


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    seed: int = 0,
    end_of_text: int | None = None,
    progress: float = 1.0,
    cuts: Float[Array, " S"] | None = None,
) -> list[list[int]]:
    """Continues every prompt by up to `tokens` token ids; prompts of any lengths go in one batch.

    temperature: 0 takes the likeliest token, deterministically. top_p: draws from the smallest set of tokens
    that holds this probability, after the temperature. seed: what row i draws does not depend on other rows.
    end_of_text: ends a row and is not returned; and an empty prompt begins with it, as a document does in
    training. None: no row ends early. progress: the share of its training the model has behind it. cuts: with
    Mixture-of-Depths, the average top-k cuts the threshold decider compares with.

    A prompt is taken as it is: the model reads it as a piece from within a document, unless it begins with
    `end_of_text`. Compiled once per number of prompts, `tokens`, and longest prompt rounded up to 32.

    Raises UserError: a prompt that does not fit the context together with `tokens`, has an id outside of the
    vocabulary, or is empty without `end_of_text`; another argument out of its range.
    """
    context = model.config.context
    if not 1 <= tokens < context:
        raise UserError("tokens", tokens, f"give at least 1 and less than the context of {context}")
    if not 0.0 <= temperature < math.inf:
        raise UserError("temperature", temperature, "give a number of at least 0; 0 takes the likeliest")
    if not 0.0 < top_p <= 1.0:
        raise UserError("top_p", top_p, "give a probability above 0 and up to 1; 1 draws from all tokens")
    if not 0 <= seed < 2**32:
        raise UserError("seed", seed, "use a whole number from 0 to 2**32 - 1")
    if not prompts:
        return []
    rows = [_checked(prompt, tokens, end_of_text, model.config) for prompt in prompts]
    graph, params = nnx.split(model)
    mesh = mesh_of(params)
    copies = math.prod(mesh.shape[axis] for axis in BATCH) if mesh else 1
    rows += rows[-1:] * (-len(rows) % copies)

    longest = max(map(len, rows))
    padded = np.zeros((len(rows), min(-(-longest // PROMPT_STEP) * PROMPT_STEP, context)), np.int32)
    for row, prompt in zip(padded, rows, strict=True):
        row[: len(prompt)] = prompt
    written = generate_padded(
        params,
        padded,
        np.array([len(prompt) for prompt in rows], np.int32),
        jax.random.key_data(jax.random.key(seed)),
        np.float32(temperature),
        np.float32(top_p),
        np.int32(NO_TOKEN if end_of_text is None else end_of_text),
        np.float32(progress),
        cuts,
        graph=graph,
        tokens=tokens,
        mesh=mesh,
    )
    written = jax.device_get(written)[: len(prompts)].tolist()
    return [row[: row.index(end_of_text)] if end_of_text in row else row for row in written]


def complete(run: OpenRun, prompts: Sequence[str], **options) -> list[str]:
    """The new text behind each prompt. `options` are `generate`'s: tokens, temperature, top_p, seed.

    An empty prompt begins a document; others are read as a piece from within one, behind what an imported model
    expects before every text. A row ends with its document. What is not UTF-8, in a prompt or in what the model
    wrote, is replaced.
    """
    tokenizer = run.tokenizer
    texts = [prompt.encode(errors="replace").decode() for prompt in prompts]
    before = [ids.tolist() for ids in tokenizer.encode_batch(texts)]
    ending = {"end_of_text": tokenizer.end_of_text, "progress": run.progress, "cuts": run.mod.get("cuts")}
    prompts = [run.beginning + ids for ids in before]
    after = generate(run.model, prompts, **ending, **options)
    return [_new_text(tokenizer, *ids) for ids in zip(before, after, strict=True)]


def _new_text(tokenizer, before: list[int], after: list[int]) -> str:
    """Decoded behind the prompt where possible: some tokenizers drop the space at the beginning of a text."""
    start, whole = tokenizer.decode(before), tokenizer.decode(before + after)
    return whole[len(start) :] if whole.startswith(start) else tokenizer.decode(after)


def _checked(prompt: Sequence[int], tokens: int, end_of_text: int | None, config: ModelConfig) -> list[int]:
    ids = [int(i) for i in prompt]
    if not ids and end_of_text is None:
        raise UserError("prompt", ids, "give at least one token, or end_of_text to begin a document")
    ids = ids or [end_of_text]
    room = config.context - tokens
    if len(ids) > room:
        fix = f"with {tokens} new ones it exceeds the context of {config.context}: shorten it to {room} tokens"
        if len(ids) < config.context:
            fix += f", or ask for at most {config.context - len(ids)} new ones"
        raise UserError("prompt", f"{len(ids)} tokens", fix)
    for i in ids:
        if not 0 <= i < config.vocab:
            raise UserError("prompt", i, f"the vocabulary has the ids 0 to {config.vocab - 1}")
    return ids


def mesh_of(params: nnx.State) -> Mesh | None:
    """The mesh the parameters are spread over, None on a single device."""
    sharding = jax.tree.leaves(params)[0].sharding
    return sharding.mesh if isinstance(sharding, NamedSharding) and sharding.mesh.size > 1 else None


def _narrow(params: nnx.State, dtype) -> nnx.State:
    """Matrices in the computation's dtype, as every branch reads them: once here, not for each token."""

    def narrow(variable: nnx.Variable) -> nnx.Variable:
        matrix = variable.get_metadata()["role"] == "matrix"
        return variable.replace(variable[...].astype(dtype)) if matrix else variable

    return jax.tree.map(narrow, params, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))


def _generate(
    params: nnx.State,
    prompts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    key: UInt32[Array, "2"],
    temperature: Float[Array, ""],
    top_p: Float[Array, ""],
    stop: Int[Array, ""],
    progress: Float[Array, ""],
    cuts: Float[Array, " S"] | None,
    *,
    graph: nnx.GraphDef,
    tokens: int,
    mesh: Mesh | None,
) -> Int[Array, "B tokens"]:
    """New tokens of right-padded prompts; what follows a row's first `stop` is `stop` too.

    The cache's slot is the token's position. A prompt's padding fills the slots that its row's new tokens
    will take; each of them is written again before the first query that may see it: padding is never read.
    With Mixture-of-Depths tokens run by the causal decider, in the prompts as in what follows.
    """
    model = nnx.merge(graph, params)
    model = nnx.merge(graph, _narrow(params, model.config.compute_dtype))
    table = model.head_rows()
    batch, padded = prompts.shape
    options = {"progress": progress, "cuts": cuts, "causal": True} | ({"pin": pin_rows(mesh)} if mesh else {})
    keys = jax.vmap(jax.random.fold_in, (None, 0))(jax.random.wrap_key_data(key), jnp.arange(batch))

    def forward(tokens: Int[Array, "B T"], where: Where, cache: tuple, last: Int[Array, " B"]):
        """Logits [B, V] at the index `last` of each row, and the cache."""
        output = model(tokens, where, cache=cache, **options)
        at = (jnp.arange(batch), last)
        return unembed(output.hidden[at][:, None], output.log_scale[at][:, None], table)[:, 0], output.cache

    def going(carry):
        index, _, done, _, _ = carry
        return (index < tokens) & ~jnp.all(done)

    def step(carry):
        index, logits, done, written, cache = carry
        drawn = choose(logits, jax.vmap(jax.random.fold_in, (0, None))(keys, index), temperature, top_p)
        token = jnp.where(done, stop, drawn)
        written = written.at[:, index].set(token)
        # The last token's logits are for nobody; a branch around this pass would copy the cache every time.
        where = Where(jnp.ones((batch, 1), jnp.int32), (lengths + index)[:, None])
        logits, cache = forward(token[:, None], where, cache, jnp.zeros_like(lengths))
        return index + 1, logits, token == stop, written, cache

    cache = model.empty_cache(batch, min(padded + tokens, model.config.context))
    where = Where.whole(batch, padded)
    where = where._replace(segments=(where.positions < lengths[:, None]).astype(jnp.int32))
    logits, cache = forward(prompts, where, cache, lengths - 1)
    start = jnp.int32(0), logits, jnp.zeros(batch, bool), jnp.full((batch, tokens), stop, jnp.int32), cache
    return jax.lax.while_loop(going, step, start)[3]


def _placed(*arrays, mesh: Mesh | None, **static):
    return shard_rows(functools.partial(_generate, mesh=mesh, **static), mesh, P(BATCH))(*arrays)


generate_padded = jax.jit(_placed, static_argnames=("graph", "tokens", "mesh"))
