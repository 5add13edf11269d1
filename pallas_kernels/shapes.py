"""The shapes that tests, benchmarks and ahead-of-time compilation share, every op's arguments at a shape, and the
tolerance for an op's results.

Widths: powers of two, common model widths (96, 640, 1000), a prime-like SwiGLU width (5461), and the widest rows that
all default kernels support in bfloat16 (8192). Rows: one, an odd handful, and two sizes of real batches.
"""

import math
from typing import NamedTuple

import jax.numpy as jnp
from jax import ShapeDtypeStruct as Like
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

# For interpreters, which are slow: they run one Python step per block and operation.
COVER_SMALL = ((1, 64, "float32"), (7, 96, "bfloat16"), (20, 640, "float32"), (5, 1000, "bfloat16"))

# The other widths, also with few rows: an interpreter's time depends on the number of blocks, not on the width.
COVER_WIDE = (
    (1, 128, "bfloat16"),
    (3, 2048, "float32"),
    (2, 4096, "bfloat16"),
    (1, 5461, "float32"),
    (1, 8192, "bfloat16"),
)

# For the published tables: the widths of models from 1 to 70 billion parameters.
BENCH = tuple((16384, width, "bfloat16") for width in (2048, 4096, 5461, 8192))
BENCH_CPU = ((2048, 256, "float32"), (2048, 640, "float32"))


def tolerance(dtype: DTypeLike, width: int, sums: int = 4) -> dict[str, float]:
    """`rtol` and `atol` for a result of RMS one against its float64 value.

    rtol: one rounding to the output dtype, half an ulp, and the same again for results near the middle between two
    numbers. atol: a float32 sum of `width` random terms is off by about sqrt(width) roundings, and the errors of `sums`
    such row statistics reach every element. Inputs are exact: the float64 value is computed from the rounded inputs.
    """
    epsilon = float(jnp.finfo(dtype).eps)
    return {"rtol": epsilon, "atol": sums * math.sqrt(width) * float(jnp.finfo(jnp.float32).eps)}


GATES = 32  # directions C of a modulator
GROUPS, SHARE = 4, 4  # row ops: groups of rows, and one row in SHARE selected


class Sample(NamedTuple):
    """Abstract arguments of an op's implementations, including [N, D] rows, and compile-time constants.

    `sizes` are the arguments of `bytes_moved` besides the rows. Ops without `sizes` work on selected rows in place:
    they use only a part of their operands, which a program's text does not show. The others visit each row once.
    """

    args: tuple[Like, ...]
    constants: dict[str, float]
    sizes: tuple[int, ...] | None = ()


def sample(op: str, n: int, width: int, dtype: str) -> Sample:
    """The arguments of the op with `n` rows of `width`. Raises ValueError for an unknown op."""
    row, scalar, vector = Like((n, width), dtype), Like((n,), jnp.float32), Like((width,), jnp.float32)
    gates, one = Like((GATES,), jnp.float32), Like((), jnp.float32)
    each = max(n // GROUPS, SHARE)
    x, part = Like((GROUPS, each, width), dtype), Like((GROUPS, each // SHARE, width), dtype)
    numbers, turns = Like(part.shape[:2], jnp.int32), Like(part.shape[:2], jnp.float32)
    weight, log_norm = Like((width, GATES), jnp.float32), Like(x.shape[:2], jnp.float32)
    known = {
        "nag_update": Sample((row, scalar, row, scalar), {}),
        "nag_update_modulated": Sample((row, scalar, row, weight, gates, gates, one, one), {}, (GATES,)),
        "add_rms_norm": Sample((row, row, vector), {"epsilon": 1e-6}),
        "review_update": Sample((row, row, row, row, vector, vector), {"epsilon": 1e-5}),
        "take_rows": Sample((x, numbers), {"rows": each}, None),
        "put_rows": Sample((x, part, numbers), {}, None),
        "nag_update_rows": Sample((x, log_norm, part, turns, numbers), {}, None),
    }
    if op not in known:
        raise ValueError(f"no arguments known for the op {op!r}: add them to {__name__}.sample")
    return known[op]
