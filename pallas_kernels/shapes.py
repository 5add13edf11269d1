"""The one list of shapes that tests and benchmarks share, and how exact an op must be on them.

Widths: powers of two, common model widths (96, 640, 1000), a prime-like SwiGLU width (5461), one too wide for
many kernels (8192). Rows: one, an odd handful, and two sizes of real batches.
"""

from __future__ import annotations

import math

import jax.numpy as jnp
from jax.typing import DTypeLike

WIDTHS = (64, 96, 128, 640, 1000, 2048, 4096, 5461, 8192)
ROWS = (1, 7, 1024, 16384)
DTYPES = ("float32", "bfloat16")

# Every width, every row count and both dtypes, at a size a CPU finishes: (rows, width, dtype).
COVER = (
    (16384, 64, "bfloat16"),
    (7, 96, "float32"),
    (1024, 128, "float32"),
    (7, 640, "bfloat16"),
    (1024, 1000, "float32"),
    (1, 2048, "float32"),
    (7, 4096, "bfloat16"),
    (7, 5461, "float32"),
    (1, 8192, "bfloat16"),
)

# For interpreters, which run one Python step per block and operation.
COVER_SMALL = ((1, 64, "float32"), (7, 96, "bfloat16"), (20, 640, "float32"), (5, 1000, "bfloat16"))

# The other widths, at as few rows: what an interpreter takes depends on blocks and not on widths.
COVER_WIDE = (
    (1, 128, "bfloat16"),
    (3, 2048, "float32"),
    (2, 4096, "bfloat16"),
    (1, 5461, "float32"),
    (1, 8192, "bfloat16"),
)

# What the published tables hold: the boundary of models from 1 to 70 billion parameters.
BENCH = tuple((16384, width, "bfloat16") for width in (2048, 4096, 5461, 8192))
BENCH_CPU = ((2048, 256, "float32"), (2048, 640, "float32"))


def tolerance(dtype: DTypeLike, width: int, sums: int = 4) -> dict[str, float]:
    """`rtol` and `atol` for a result of RMS one against its float64 value.

    rtol: one rounding to the output dtype, half an ulp, and as much again for results that lie near the
    middle of two numbers. atol: a float32 sum of `width` random terms is off by about sqrt(width) roundings,
    and the errors of `sums` such row statistics reach every element. Inputs are exact: the float64 value is
    computed from the rounded inputs.
    """
    epsilon = float(jnp.finfo(dtype).eps)
    return {"rtol": epsilon, "atol": sums * math.sqrt(width) * float(jnp.finfo(jnp.float32).eps)}
