"""The error of quantisation, on any hardware: arrays are rounded to few bits and converted back.

The scale is the largest magnitude over `axes` (default: all). So nothing is clipped, and one outlier makes the grid
coarse for all elements that share its scale. Computed in float32; shape and dtype stay the same.
"""

from collections.abc import Sequence
from typing import Annotated

import jax.numpy as jnp
from jaxtyping import Array, Float

from nagjax.measure.norms import TINY
from nagjax.ranges import Range, check_value

FLOAT8_MAX = 448.0  # of e4m3: 4 bits of exponent, 3 of mantissa, no infinities (Micikevicius et al. 2022)


def integer_round_trip(x: Float[Array, "*n"], bits: int = 8, axes: Sequence[int] | None = None) -> Float[Array, "*n"]:
    """`s round(x / s)`, `s = max |x| / (2^(bits-1) - 1)`: symmetric absmax quantisation (Dettmers et al. 2022,
    arXiv:2208.07339, Section 2), rounding half to even. Raises UserError for less than 2 bits."""
    check_value("bits", bits, Annotated[int, Range(ge=2)])
    wide, most = x.astype(jnp.float32), 2.0 ** (bits - 1) - 1.0
    step = _largest(wide, axes) / most
    return (step * jnp.round(wide / step)).astype(x.dtype)


def float8_round_trip(x: Float[Array, "*n"], axes: Sequence[int] | None = None) -> Float[Array, "*n"]:
    """`s e4m3(x / s)`, `s = max |x| / 448`, in the 8-bit floating point of Micikevicius et al. 2022, arXiv:2209.05433.
    A step is 1/8 to 1/16 of the value, and at least 2^-9 s; rounding half to even.

    The rounding is computed in float32: XLA's own conversion goes through float16, which it does not compile for CPUs
    without F16C.
    """
    wide = x.astype(jnp.float32)
    scale = _largest(wide, axes) / FLOAT8_MAX
    stored = jnp.clip(wide / scale, -FLOAT8_MAX, FLOAT8_MAX)
    _, exponent = jnp.frexp(stored)
    step = jnp.ldexp(jnp.float32(1.0), jnp.maximum(exponent - 4, -9))
    return (scale * (step * jnp.round(stored / step))).astype(x.dtype)


def _largest(x: Float[Array, "*n"], axes: Sequence[int] | None) -> Array:
    axes = tuple(axes) if axes is not None else None
    return jnp.maximum(jnp.max(jnp.abs(x), axis=axes, keepdims=True), TINY)
