"""Linear maps, with or without a bias."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nagjax.layers import cpu
from nagjax.layers.extra_columns import ExtraColumns
from nagjax.layers.int8 import Quantized
from nagjax.layers.platform import joins_matmuls, on_gpu, on_one_cpu

Map = tuple[nnx.Param, nnx.Param | None]  # a weight, and a bias or None


def linear(x: Float[Array, "B T m"], weight: nnx.Param, added: nnx.Param | None) -> Float[Array, "B T n"]:
    """`x W`, plus the bias if there is one, in x's dtype."""
    return linears(x, (weight, added))[0]


def linears(
    x: Float[Array, "B T m"], *maps: Map, extra: ExtraColumns | None = None
) -> tuple[Float[Array, "B T _"], ...]:
    """Several linear maps of the same x, in x's dtype. Where they run as one matmul, it also computes the extra
    columns."""
    weights = _weights(x, maps)
    if not on_one_cpu() or any(isinstance(weight, Quantized) for weight in weights):
        found = [x @ weight for weight in weights]
    elif extra is None:
        found = cpu.matmuls(x, *weights)
    else:
        *found, extra.product = cpu.matmuls(x, *weights, extra.weight.astype(x.dtype))
    return _with_biases(found, maps)


def linears_then(
    then: Callable[..., Any], x: Float[Array, "B T m"], *maps: Map, extra: ExtraColumns | None = None
) -> Any:
    """`then(*linears(x, *maps))`, where `then` is elementwise or nearly so. On a GPU with many rows, one matmul
    computes all maps and the extra columns, and the backward pass computes `then` again; otherwise it would write and
    read several arrays of the size of its result."""
    if not on_gpu():
        return then(*(linear(x, *one) for one in maps))
    weights = _weights(x, maps)
    ends = list(itertools.accumulate(weight.shape[-1] for weight in weights))
    # Joining copies the weights and saves a pass over x and its cotangent for each: it pays only for many rows.
    if not (joins_matmuls() and _are_arrays(weights) and math.prod(x.shape[:-1]) >= ends[-1]):
        return jax.checkpoint(lambda *found: then(*_with_biases(found, maps)))(*(x @ weight for weight in weights))
    if extra is not None:
        weights.append(extra.weight.astype(x.dtype))
    joined = cpu.once(x @ jnp.concatenate(weights, axis=-1))  # also makes its cotangent one array

    def both(y: Float[Array, "B T n"]) -> tuple[Any, Float[Array, "B T C"]]:
        # Flat rows: otherwise XLA:GPU gives an MLP, through `more`, the transposed layout that attention prefers.
        more = y.reshape(-1, y.shape[-1])[:, ends[-1] :]
        found = jnp.split(y, ends, axis=-1)[:-1]
        return then(*_with_biases(found, maps)), more.reshape(*y.shape[:-1], more.shape[-1])

    result, more = jax.checkpoint(both)(joined)
    if extra is not None:
        extra.product = more
    return result


def _are_arrays(weights: list) -> bool:
    """Whether all weights are arrays, not `LowRank` or `Quantized`."""
    return all(isinstance(weight, jax.Array) for weight in weights)


def _weights(x: Array, maps: tuple[Map, ...]) -> list:
    return [weight[...].astype(x.dtype) for weight, _ in maps]


def _with_biases(found, maps: tuple[Map, ...]) -> tuple[Array, ...]:
    biases = (added for _, added in maps)
    return tuple(y if b is None else y + b[...].astype(y.dtype) for y, b in zip(found, biases, strict=True))
