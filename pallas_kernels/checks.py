"""Argument checks shared by the ops: a ValueError that names the argument, its shape and what is accepted."""

import contextlib
from collections.abc import Iterator, Mapping
from contextvars import ContextVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.dtypes import canonicalize_dtype

FLOATS = (jnp.bfloat16, jnp.float16, jnp.float32, jnp.float64)  # float64 is for oracles


def refuse_argument(op: str, name: str, got: object, accepted: str) -> None:
    raise ValueError(f"{op}: {name} = {got}; accepted: {accepted}")


def describe(array: jax.Array) -> str:
    return f"{jnp.dtype(array.dtype).name}{list(array.shape)}"


def check_float(op: str, **arrays: jax.Array) -> None:
    """Checks that every array has one of the floating dtypes in which ops compute. Raises ValueError otherwise."""
    for name, array in arrays.items():
        if array.dtype not in FLOATS:
            refuse_argument(op, name, describe(array), "a floating dtype (bfloat16, float16 or float32)")


def check_dtype(op: str, dtype: object, *rows: jax.Array, **arrays: jax.Array) -> None:
    """Checks that JAX reads every array as exactly this dtype, or as float64 if one of `rows` is float64, as in
    oracles. Without 64-bit types JAX reads NumPy's float64 as float32. Raises ValueError otherwise."""
    dtype, wide = canonicalize_dtype(dtype), jnp.float64 in [canonicalize_dtype(x.dtype) for x in rows]
    for name, array in arrays.items():
        own = canonicalize_dtype(array.dtype)
        if own != dtype and not (wide and own == jnp.float64):
            refuse_argument(op, name, describe(array), dtype.name)


def as_scale(op: str, scale: object, gain: object) -> jax.Array:
    """The factor, which may be a Python number, as an array in the dtype of the gain beside it. Raises ValueError for
    anything else."""
    if not hasattr(scale, "dtype") and not isinstance(scale, int | float):
        refuse_argument(op, "scale", repr(scale), "a number")
    if hasattr(scale, "dtype") and scale.dtype.kind not in "iuf" and scale.dtype not in FLOATS:
        refuse_argument(op, "scale", describe(scale), "a number")
    return jnp.asarray(scale, jnp.result_type(gain) if hasattr(gain, "dtype") else jnp.float32)


def check_shapes(op: str, shapes: Mapping[str, tuple[jax.Array, tuple]]) -> dict[str, object]:
    """Matches each array against a tuple of letters and numbers; "..." matches any leading dimensions. Raises
    ValueError for an array that does not match.

    `check_shapes("op", {"x": (x, ("...", "D")), "gain": (gain, ("D",))})` returns the values of "..." and "D".
    """
    bound: dict[str, object] = {}
    for name, (array, pattern) in shapes.items():
        want = " ".join(map(str, pattern))
        if not hasattr(array, "shape"):
            refuse_argument(op, name, f"{array!r:.60}", f"an array [{want}]")
        dims = list(array.shape)
        rest = [p for p in pattern if p != "..."]
        ok = len(dims) >= len(rest) if "..." in pattern else len(dims) == len(rest)
        if ok and "..." in pattern:
            lead = tuple(dims[: len(dims) - len(rest)])
            dims = dims[len(lead) :]
            ok = bound.setdefault("...", lead) == lead
        ok = ok and all(
            size == p if isinstance(p, int) else bound.setdefault(p, size) == size
            for size, p in zip(dims, rest, strict=True)
        )
        if not ok:
            known = {k: v for k, v in bound.items() if k in pattern}
            refuse_argument(op, name, describe(array), f"[{want}] with {known}" if known else f"[{want}]")
    return bound


def check_epsilon(op: str, epsilon: object) -> None:
    if not isinstance(epsilon, float) or not 0 < epsilon < 1:
        refuse_argument(op, "epsilon", epsilon, "a Python float between 0 and 1")


_checking: ContextVar[bool] = ContextVar("check_indices", default=False)


@contextlib.contextmanager
def checking_indices() -> Iterator[None]:
    """Inside this context row ops check their indices: they raise ValueError at once, or (inside jit) when the program
    runs.

    Without this check, indices that are out of range or repeated have undefined results.
    """
    token = _checking.set(True)
    try:
        yield
    finally:
        _checking.reset(token)


def check_indices(op: str, indices: jax.Array, rows: int) -> None:
    """Checks that indices are unique and in [0, rows). Does nothing outside of `checking_indices`."""
    if not _checking.get():
        return

    def look(values):
        values = np.asarray(values)
        if values.size and (values.min() < 0 or values.max() >= rows):
            raise ValueError(
                f"{op}: indices from {values.min()} to {values.max()}; accepted: 0 to {rows - 1}, the rows of x"
            )
        in_order = np.sort(values, axis=-1)
        twice = in_order[..., 1:][np.diff(in_order, axis=-1) == 0]
        if twice.size:
            raise ValueError(f"{op}: indices hold {twice[0]} twice; accepted: each row once")

    if isinstance(indices, jax.core.Tracer):
        jax.debug.callback(look, indices)
    else:
        look(indices)
