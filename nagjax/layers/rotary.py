"""Rotary position embedding."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nagjax.layers.config import RopeConfig

UNSCALED = RopeConfig()


def frequencies(half: int, base: float, rope: RopeConfig = UNSCALED) -> Float[Array, " half"]:
    """Radians per token for each pair of features, float32: `base ** (-i / half)`, scaled as `rope` says."""
    plain = base ** (-jnp.arange(half, dtype=jnp.float32) / half)
    if rope.scaling == "none":
        return plain
    if rope.scaling == "linear":
        return plain / rope.factor
    if rope.scaling == "longrope":
        return plain / jnp.asarray(rope.divisors, jnp.float32)
    if rope.scaling == "yarn":
        kept = _kept_by_yarn(half, base, rope)
    else:
        turns = rope.original * plain / (2 * jnp.pi)  # turns of a pair over the original context
        kept = jnp.clip((turns - rope.low) / (rope.high - rope.low), 0.0, 1.0)
    return kept * plain + (1.0 - kept) * plain / rope.factor


def _kept_by_yarn(half: int, base: float, rope: RopeConfig) -> Float[Array, " half"]:
    """YaRN's weights of the unscaled frequencies: 1 up to the last pair that turns at least `high` times over the
    original context, 0 from the first pair that turns at most `low` times, linear in between. Both pairs are rounded to
    whole numbers."""

    def pair(turns: float) -> float:
        return half * math.log(rope.original / (turns * 2 * math.pi)) / math.log(base)

    first, last = max(math.floor(pair(rope.high)), 0), min(math.ceil(pair(rope.low)), 2 * half - 1)
    last = last if last > first else first + 0.001
    return 1.0 - jnp.clip((jnp.arange(half, dtype=jnp.float32) - first) / (last - first), 0.0, 1.0)


def turns(
    positions: Int[Array, "B T"], half: int, base: float, rope: RopeConfig = UNSCALED
) -> tuple[Float[Array, "B T half"], Float[Array, "B T half"]]:
    """Cosine and sine of the rotation angle of each pair of features at each position, times `rope.attention`,
    float32."""
    angle = positions[..., None].astype(jnp.float32) * frequencies(half, base, rope)
    if rope.attention == 1.0:
        return jnp.cos(angle), jnp.sin(angle)
    return rope.attention * jnp.cos(angle), rope.attention * jnp.sin(angle)


def rotary(
    x: Float[Array, "B T H Dh"],
    positions: Int[Array, "B T"],
    base: float = 10_000.0,
    rope: RopeConfig = UNSCALED,
    rotated: int | None = None,
) -> Float[Array, "B T H Dh"]:
    """Rotates the halves of each head by position-dependent angles; float32 inside, returns x's dtype.

    `(x1, x2) -> (x1 cos - x2 sin, x2 cos + x1 sin)` with angle `position * base ** (-2i/rotated)`: Su et al. 2021,
    arXiv:2104.09864, in the half-split layout of Llama checkpoints. Only the first `rotated` features are rotated
    (default: all); their number must be even.
    """
    rotated = x.shape[-1] if rotated is None else rotated
    return turned(x, *turns(positions, rotated // 2, base, rope))


def turned(
    x: Float[Array, "B T H Dh"], cos: Float[Array, "B T half"], sin: Float[Array, "B T half"]
) -> Float[Array, "B T H Dh"]:
    """`rotary` with given cosines and sines; float32 inside, returns x's dtype. Features after the first 2 half are not
    rotated."""
    half = cos.shape[-1]
    rotated = 2 * half
    cos, sin = cos[:, :, None], sin[:, :, None]
    x1, x2 = x[..., :half].astype(jnp.float32), x[..., half:rotated].astype(jnp.float32)
    done = jnp.concatenate([x1 * cos - x2 * sin, x2 * cos + x1 * sin], axis=-1).astype(x.dtype)
    return done if rotated == x.shape[-1] else jnp.concatenate([done, x[..., rotated:]], axis=-1)
