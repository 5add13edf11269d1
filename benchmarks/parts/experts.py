"""Part `experts`: errors and time of the matmuls of dropless experts, by XLA alone and by the implementation that
nagjax chooses."""

import contextlib
import functools
from collections.abc import Iterator
from unittest import mock

import jax
import jax.numpy as jnp

from benchmarks.parts.attention import error, in_float32, milliseconds
from benchmarks.parts.rows import Case, Options
from nagjax.layers import ragged

IMPLEMENTATIONS = {"gpu": ("xla", "chosen"), "tpu": ("chosen",), "cpu": ("chosen",)}


def here() -> tuple[str, ...]:
    """The implementations that differ on this platform: without tokamax's kernels, nagjax chooses XLA's."""
    named = IMPLEMENTATIONS[jax.devices()[0].platform]
    return named if ragged.usable() else named[:1]


def cases(options: Options) -> Iterator[Case]:
    shapes = [(64, 4, 16, 32)] if options.rehearsal else [(16384, 8, 1024, 2816), (16384, 64, 1024, 352)]
    for shape in shapes:
        for implementation in here():
            name = {"shape": list(shape), "implementation": implementation}
            yield Case(name, functools.partial(measure, shape, implementation))


def measure(shape: tuple[int, int, int, int], implementation: str) -> dict:
    """For sorted rows in groups of unequal sizes and [m, n] matrices, in bfloat16: relative errors (2-norm, against
    float32, group by group) of the product and both gradients, and milliseconds of both passes."""
    count, groups, m, n = shape
    keys = jax.random.split(jax.random.key(0), 4)
    draw = lambda key, *shape: jax.random.normal(key, shape, jnp.bfloat16)  # noqa: E731
    rows, matrices, pulled = draw(keys[0], count, m), draw(keys[1], groups, m, n), draw(keys[2], count, n)
    of = jax.random.randint(keys[3], (count - count // 8,), 0, groups)  # an eighth of the rows belongs to no expert
    sizes = jnp.bincount(of, length=groups).astype(jnp.int32)

    def both(product, rows, matrices, pulled):
        out, pull = jax.vjp(lambda *x: product(*x, sizes), rows, matrices)
        return out, *pull(pulled.astype(out.dtype))

    exact = in_float32(functools.partial(both, ragged._in_blocks), rows, matrices, pulled)
    program = jax.jit(functools.partial(both, ragged.ragged_matmul))
    with mock.patch.object(ragged, "usable", lambda: False) if implementation == "xla" else contextlib.nullcontext():
        found = jax.block_until_ready(program(rows, matrices, pulled))
    errors = {f"error_{x}": error(a, b) for x, a, b in zip(("out", "drows", "dmatrices"), found, exact, strict=True)}
    return errors | {"milliseconds": milliseconds(lambda: program(rows, matrices, pulled))}
