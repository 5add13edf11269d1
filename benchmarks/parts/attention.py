"""Part `attention`: the error of each implementation against float32 softmax attention, and its time."""

import dataclasses
import functools
import importlib.util
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.parts.rows import Case, Options
from nagjax.layers.attend import attend
from nagjax.layers.where import Where
from nagjax.mod import kept
from nagjax.model.config import ModelConfig
from pallas_kernels.bench import in_one_line
from pallas_kernels.timing import seconds

IMPLEMENTATIONS = {"gpu": ("cudnn", "xla", "tokamax"), "tpu": ("splash", "xla"), "cpu": ("xla",)}
REPEATS = 7


def here() -> list[str]:
    """The implementations for this platform whose packages are installed."""
    named = IMPLEMENTATIONS[jax.devices()[0].platform]
    return [name for name in named if name != "tokamax" or importlib.util.find_spec("tokamax")]


def cases(options: Options) -> Iterator[Case]:
    shapes = [(1, 32, 2, 8)] if options.rehearsal else [(8, 2048, 10, 64), (4, 4096, 16, 64), (4, 2048, 16, 128)]
    for shape in shapes:
        for documents in (1, 4):
            for implementation in here():
                name = {"shape": list(shape), "documents": documents, "implementation": implementation}
                yield Case(name, functools.partial(measure, shape, documents, implementation))


def measure(shape: tuple[int, int, int, int], documents: int, implementation: str) -> dict:
    """Relative errors (2-norm, against float32) of the output and the three gradients, and milliseconds of both
    passes."""
    q, k, v, pulled, where = inputs(shape, documents)
    program = jax.jit(functools.partial(both, where, implementation))
    exact, found = _exact(shape, documents), jax.block_until_ready(program(q, k, v, pulled))
    names = ("out", "dq", "dk", "dv")
    errors = {f"error_{name}": error(a, b) for name, a, b in zip(names, found, exact, strict=True)}
    return errors | {"milliseconds": milliseconds(lambda: program(q, k, v, pulled))}


def working(model: ModelConfig, batch: int) -> ModelConfig:
    """The model for whole steps of `batch` sequences. It uses XLA's attention if the one that "auto" chooses fails
    here, with the queries of all tokens or with as many as Mixture-of-Depths chooses."""
    shape = batch, model.context, model.heads, model.head_width
    rates = {rate for rate, _ in model.mod.rates(model.depth) if 0.0 < rate < 1.0}
    counts = [model.context, *sorted({kept(rate, model.context) for rate in rates})]
    fails = any(_chosen(shape, count) == "xla" for count in counts)
    return dataclasses.replace(model, attention="xla" if fails else "auto")


@functools.cache
def _chosen(shape: tuple[int, int, int, int], queries: int) -> str:
    try:
        q, k, v, pulled, where = inputs(shape, 1)
        first = lambda x: x[:, :queries]  # noqa: E731
        asking = Where(*map(first, where))
        found = jax.jit(functools.partial(both, where, "auto", asking=asking))(first(q), k, v, first(pulled))
        if not all(np.isfinite(np.asarray(x, np.float32)).all() for x in found):
            raise FloatingPointError("values that are not finite")
    except Exception as failed:  # only a GPU can compile cuDNN's attention; a slower step is better than none
        at = f"attention at {list(shape)} with {queries} queries"
        print(f"{at}: XLA's, as that of auto failed: {in_one_line(failed)}", flush=True)
        return "xla"
    return "auto"


def inputs(
    shape: tuple[int, int, int, int], documents: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array, Where]:
    """Queries, keys, values, the output's cotangent, and the positions of documents in rows."""
    batch, tokens, _, _ = shape
    own = jnp.repeat(jnp.arange(1, documents + 1), tokens // documents)
    where = Where(
        jnp.broadcast_to(own, (batch, tokens)).astype(jnp.int32),
        jnp.broadcast_to(jnp.arange(tokens) % (tokens // documents), (batch, tokens)).astype(jnp.int32),
    )
    return *jax.random.normal(jax.random.key(0), (4, *shape), jnp.bfloat16), where


def both(where: Where, implementation: str, q, k, v, pulled, asking: Where | None = None) -> tuple[jax.Array, ...]:
    """Attention's output, and the gradients of queries, keys and values. `asking` gives the positions of queries if
    they differ from those of keys."""
    out, pull = jax.vjp(lambda *x: attend(*x, asking or where, where, implementation), q, k, v)
    return out, *pull(pulled.astype(out.dtype))


@functools.lru_cache(maxsize=1)  # cases with the same shape follow each other
def _exact(shape: tuple[int, int, int, int], documents: int) -> tuple[jax.Array, ...]:
    """The results in float32, computed row by row, because the scores of all rows may not fit into memory even if the
    implementations that are measured keep none. All rows have the same `where`."""
    *arrays, where = inputs(shape, documents)
    row = Where(*(x[:1] for x in where))
    one = lambda x: [y[0] for y in both(row, "xla", *(part[None] for part in x))]  # noqa: E731
    return in_float32(lambda *x: tuple(jax.lax.map(one, x)), *arrays)


def in_float32(program, *args: jax.Array) -> tuple[jax.Array, ...]:
    """The program's results with float32 operands and true float32 products; by default, accelerators use less precise
    products."""
    with jax.default_matmul_precision("highest"):
        return jax.jit(program)(*(x.astype(jnp.float32) for x in args))


def error(found, exact) -> float:
    found, exact = np.asarray(found, np.float32), np.asarray(exact, np.float32)
    if not np.isfinite(found).all():
        raise FloatingPointError("values that are not finite")
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def milliseconds(call: Callable[[], object]) -> float:
    return 1e3 * seconds(call, REPEATS)
