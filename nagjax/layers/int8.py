"""8-bit weights for sampling: integers, and one scale per output channel.

    q = round(W / s),    s = max |W| / 127 over an output's inputs,    x W ~ (x q) s

Symmetric, rounded to the nearest: every weight changes by at most s / 2. Activations are not quantised: the integers
are widened to the dtype of x before the product (Dettmers et al. 2022, arXiv:2208.07339, Section 2, for the scales).

Numerics: sums and the product with the scale are float32, rounded once to x's dtype or to another one that is asked
for.
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
    """8-bit matrices [..., in, out] with scales [..., 1, out], or an 8-bit table whose rows [V, D] are its outputs,
    with scales [V, 1]. It replaces a parameter in `nagjax.layers`."""

    values: Int8[Array, "*n i o"]
    scale: Float[Array, "*n #i #o"]

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, at: Any) -> Any:
        """With `...` the whole object; for a table, otherwise the rows at these indices, as float32."""
        return self if at is Ellipsis else self.values[at] * self.scale[at]

    def astype(self, dtype: Any) -> "Quantized":
        return self

    def __rmatmul__(self, x: Float[Array, "*B i"]) -> Float[Array, "*B o"]:
        return self.product(x, 0)

    def product(self, x: Float[Array, "*B i"], over: int, dtype: Any = None) -> Float[Array, "*B o"]:
        """Product of x's last axis with the axis `over` of one matrix. dtype: of the result; None: that of x."""
        sums = jax.lax.dot_general(
            x,
            self.values.astype(x.dtype),
            (((x.ndim - 1,), (over,)), ((), ())),
            preferred_element_type=jnp.promote_types(x.dtype, jnp.float32),
        )
        return (sums * self.scale.squeeze(over)).astype(x.dtype if dtype is None else dtype)


def quantized(weight: Float[Array, "*n i o"], over: int = -2) -> Quantized:
    """The weights of every output channel, which run along the axis `over`, as integers from -127 to 127 with a scale.
    A channel of zeros stays zero."""
    most = jnp.max(jnp.abs(weight), axis=over, keepdims=True)
    scale = jnp.where(most > 0, most / LARGEST, 1.0)
    return Quantized(jnp.clip(jnp.round(weight / scale), -LARGEST, LARGEST).astype(jnp.int8), scale)


def widened(weight: Any) -> Any:
    """A quantised weight as one float32 array, for code that needs all of it; an array is returned as it is."""
    return weight.values * weight.scale if isinstance(weight, Quantized) else weight
