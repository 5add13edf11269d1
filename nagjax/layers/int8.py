"""Weights in 8 bits for sampling: integers, and one scale per output channel.

    q = round(W / s),    s = max |W| / 127 over an output's inputs,    x W ~ (x q) s

Symmetric, rounded to the nearest: every weight moves by at most s / 2. Activations are not quantised: the integers are
widened to the dtype of x where they are multiplied (Dettmers et al. 2022, arXiv:2208.07339, Section 2, for the scales).
Numerics: sums and the product with the scale in float32, rounded once, to x's dtype unless another one is asked for.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int8

LARGEST = 127  # -128 stays unused, so that the range is symmetric


@functools.partial(jax.tree_util.register_dataclass, data_fields=["values", "scale"], meta_fields=[])
@dataclasses.dataclass(frozen=True)
class Quantized:
    """Matrices [..., in, out] with scales [..., 1, out], or a table of rows [V, D], which are its outputs, with scales
    [V, 1]; it takes the place of a parameter in `nagjax.layers`."""

    values: Int8[Array, "*n i o"]
    scale: Float[Array, "*n #i #o"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, at: Any) -> Any:
        """All of it; of a table also the rows at these places, as float32."""
        return self if at is Ellipsis else self.values[at] * self.scale[at]

    def astype(self, dtype: Any) -> "Quantized":
        return self

    def __rmatmul__(self, x: Float[Array, "*B i"]) -> Float[Array, "*B o"]:
        return self.product(x, 0)

    def product(self, x: Float[Array, "*B i"], over: int, dtype: Any = None) -> Float[Array, "*B o"]:
        """x's last axis with one matrix's axis `over`, as `dtype` (None: that of x)."""
        sums = jax.lax.dot_general(
            x,
            self.values.astype(x.dtype),
            (((x.ndim - 1,), (over,)), ((), ())),
            preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
        )
        return (sums * self.scale.squeeze(over)).astype(x.dtype if dtype is None else dtype)


def quantized(weight: Float[Array, "*n i o"], over: int = -2) -> Quantized:
    """Every output channel's weights, along the axis `over`, as integers from -127 to 127. A channel of zeros stays
    one."""
    most = jnp.max(jnp.abs(weight), axis=over, keepdims=True)
    scale = jnp.where(most > 0, most / LARGEST, 1.0)
    return Quantized(jnp.clip(jnp.round(weight / scale), -LARGEST, LARGEST).astype(jnp.int8), scale)


def widened(weight: Any) -> Any:
    """As one float32 array, for what needs the whole of it; an array as it is."""
    return weight.values * weight.scale if isinstance(weight, Quantized) else weight
