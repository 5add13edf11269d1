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
from nagjax.layers.int8 import Quantized
from nagjax.layers.platform import joins_products, on_gpu, on_one_cpu

Map = tuple[nnx.Param, nnx.Param | None]  # a weight, and a bias or None


def linear(x: Float[Array, "B T m"], weight: nnx.Param, added: nnx.Param | None) -> Float[Array, "B T n"]:
    """`x W`, plus the bias if there is one, in x's dtype."""
    return linears(x, (weight, added))[0]


def linears(x: Float[Array, "B T m"], *maps: Map) -> tuple[Float[Array, "B T _"], ...]:
    """Several linear maps of the same x."""
    weights = _weights(x, maps)
    joined = on_one_cpu() and not any(isinstance(weight, Quantized) for weight in weights)
    found = cpu.products(x, *weights) if joined else [x @ weight for weight in weights]
    return _with_biases(found, maps)


def linears_then(then: Callable[..., Any], x: Float[Array, "B T m"], *maps: Map) -> Any:
    """`then(*linears(x, *maps))`, `then` being elementwise or nearly so. On a GPU the products are one, and `then` is
    computed again for the gradient, which otherwise writes and reads several arrays of its size."""
    if not on_gpu():
        return then(*(linear(x, *one) for one in maps))
    weights = _weights(x, maps)
    ends = list(itertools.accumulate(weight.shape[-1] for weight in weights))
    # Joining copies the weights, and saves a pass over x and its cotangent for each: not for the few rows of decoding.
    plain = all(isinstance(weight, jax.Array) for weight in weights)  # neither `LowRank` nor `Quantized`
    if not (joins_products() and plain and math.prod(x.shape[:-1]) >= ends[-1]):
        return jax.checkpoint(lambda *found: then(*_with_biases(found, maps)))(*(x @ weight for weight in weights))
    product = cpu.once(x @ jnp.concatenate(weights, axis=-1))  # so that its cotangent, too, is written as one array
    return jax.checkpoint(lambda y: then(*_with_biases(jnp.split(y, ends[:-1], axis=-1), maps)))(product)


def _weights(x: Array, maps: tuple[Map, ...]) -> list:
    return [weight[...].astype(x.dtype) for weight, _ in maps]


def _with_biases(found, maps: tuple[Map, ...]) -> tuple[Array, ...]:
    biases = (added for _, added in maps)
    return tuple(y if b is None else y + b[...].astype(y.dtype) for y, b in zip(found, biases, strict=True))
