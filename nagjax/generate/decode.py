"""The compiled programs of generation: reading windows of text into a cache, generating tokens behind them, drawing a
token."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float, Int, UInt32

from nagjax.generate.choose import Sampling, choose
from nagjax.layers.where import Where
from nagjax.model.transformer import Transformer
from nagjax.train.distributed.mesh import BATCH, for_every_process, pin_rows
from pallas_kernels.placement import shard_rows


class Pass(NamedTuple):
    """What a forward pass needs besides tokens: the share of the training done, and the cuts of Mixture-of-Depths."""

    progress: Float[Array, ""]
    cuts: Float[Array, " S"] | None


class Rows(NamedTuple):
    """Texts on the device: the logits of each text's next token, and the cache of keys and values (leaves [repeats, B,
    ...])."""

    logits: Float[Array, "B V"]
    cache: tuple


def _forward(model: Transformer, table, tokens, where: Where, cache: tuple | int, last, given: Pass, mesh: Mesh | None):
    """The logits [B, V] at the position `last` of each row, and the cache. Mixture-of-Depths uses its causal
    decider."""
    options = {"progress": given.progress, "cuts": given.cuts, "causal": True}
    output = model(tokens, where, cache=cache, **options | ({"pin": pin_rows(mesh)} if mesh else {}))
    at = (jnp.arange(tokens.shape[0]), last)
    own = output._replace(hidden=output.hidden[at][:, None], log_scale=output.log_scale[at][:, None])
    return Rows(model.logits(own, table)[:, 0], output.cache)


def _read(
    params: nnx.State,
    texts: Int[Array, "B P"],
    lengths: Int[Array, " B"],
    given: Pass,
    *,
    graph: nnx.GraphDef,
    slots: int,
    mesh: Mesh | None,
) -> Rows:
    """Reads right-padded texts at positions from 0 into caches of `slots` tokens.

    A token's slot in the cache is its position. A text's padding takes none: the slots after the text stay empty for
    its row's new tokens.
    """
    model = nnx.merge(graph, params)
    batch, padded = texts.shape
    where = Where.whole(batch, padded)
    where = where._replace(segments=(where.positions < lengths[:, None]).astype(jnp.int32))
    return _forward(model, model.head_rows(), texts, where, slots, lengths - 1, given, mesh)


def _write(
    params: nnx.State,
    rows: Rows,
    at: Int[Array, " B"],
    done: Bool[Array, " B"],
    keys: UInt32[Array, "B 2"],
    first: Int[Array, ""],
    limit: Int[Array, ""],
    sampling: Sampling,
    ends: Int[Array, " E"],
    given: Pass,
    *,
    graph: nnx.GraphDef,
    room: int,
    mesh: Mesh | None,
) -> tuple[Int[Array, "B room"], Rows]:
    """Draws up to `limit` new tokens per row, at most `room`, and reads each of them. They are the row's new tokens
    number `first` and following, at positions from `at` on. Returns their ids [B, room] and the rows after them.

    A row that is done, or has drawn one of `ends`, is filled up with the first of `ends`. The loop ends early once all
    rows are done.
    """
    model = nnx.merge(graph, params)
    table, batch = model.head_rows(), at.shape[0]

    def going(carry):
        index, done, _, _ = carry
        return (index < limit) & ~jnp.all(done)

    def step(carry):
        index, done, written, rows = carry
        token = _draw(rows.logits, keys, first + index, done, sampling, ends)
        where = Where(jnp.ones((batch, 1), jnp.int32), (at + index)[:, None])
        rows = _forward(model, table, token[:, None], where, rows.cache, jnp.zeros_like(at), given, mesh)
        return index + 1, done | jnp.isin(token, ends), written.at[:, index].set(token), rows

    start = jnp.int32(0), done, jnp.full((batch, room), ends[0], jnp.int32), rows
    _, _, written, rows = jax.lax.while_loop(going, step, start)
    return for_every_process(written, mesh), rows


def _draw(
    logits: Float[Array, "B V"],
    keys: UInt32[Array, "B 2"],
    index: Int[Array, ""],
    done: Bool[Array, " B"],
    sampling: Sampling,
    ends: Int[Array, " E"],
) -> Int[Array, " B"]:
    """New token number `index` of each row; for rows that are done, the first of `ends`."""
    own = jax.vmap(jax.random.fold_in, (0, None))(jax.random.wrap_key_data(keys), index)
    return jnp.where(done, ends[0], choose(logits, own, sampling))


def _draw_last(*known, mesh: Mesh | None) -> Int[Array, "B 1"]:
    """A token of each row that nothing follows."""
    return for_every_process(_draw(*known)[:, None], mesh)


def _place(old: Rows, new: Rows, at: Int[Array, " n"]) -> Rows:
    """`old` with the rows `at` replaced by `new`."""
    cache = jax.tree.map(lambda own, other: own.at[:, at].set(other), old.cache, new.cache)
    return Rows(old.logits.at[at].set(new.logits), cache)


def _keep(rows: Rows, at: Int[Array, " n"]) -> Rows:
    """The rows `at` alone."""
    return Rows(rows.logits[at], jax.tree.map(lambda own: own[:, at], rows.cache))


def _empty(*, graph: nnx.GraphDef, params: nnx.State, batch: int, slots: int) -> Rows:
    model = nnx.merge(graph, params)
    return Rows(jnp.zeros((batch, model.config.vocab), jnp.float32), model.empty_cache(batch, slots))


def _placed(run, *arrays, mesh: Mesh | None, **static):
    return shard_rows(functools.partial(run, mesh=mesh, **static), mesh, P(BATCH))(*arrays)


read = jax.jit(functools.partial(_placed, _read), static_argnames=("graph", "slots", "mesh"))
write = jax.jit(functools.partial(_placed, _write), static_argnames=("graph", "room", "mesh"), donate_argnums=1)
draw = jax.jit(_draw_last, static_argnames="mesh")
empty = jax.jit(_empty, static_argnames=("graph", "batch", "slots"))
place = jax.jit(_place, donate_argnums=0)
keep = jax.jit(_keep)
