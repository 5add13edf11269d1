"""A stack of sublayers without a Transformer: a scheme, its parameters, and updates handed in from outside."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nagjax.residual import Boundary, Scheme
from nagjax.residual.protocol import SublayerIndex
from tests.tolerance import relative


class Stack(NamedTuple):
    scheme: Scheme
    entries: list  # of sublayers 1 .. S, and the head's
    gates: list  # of sublayers 1 .. S
    ends: nnx.Module


def build(scheme: Scheme, *, width: int, sublayers: int, moved: float = 0.2, seed: int = 0) -> Stack:
    """Initial values, each moved by normal noise of standard deviation `moved`, so that none is special."""
    rngs = nnx.Rngs(seed)
    stack = Stack(
        scheme,
        [scheme.entry(width, rngs) for _ in range(sublayers + 1)],
        [scheme.gate(width, SublayerIndex(jnp.int32(index), sublayers), rngs) for index in range(1, sublayers + 1)],
        scheme.ends(width, 1.0, rngs),
    )
    noise = np.random.default_rng(seed)
    return jax.tree.map(
        lambda x: x + moved * noise.standard_normal(x.shape).astype(np.float32) if hasattr(x, "shape") else x,
        stack,
    )


def boundary(stack: Stack, index: int, progress: float = 1.0) -> Boundary:
    """Where sublayer `index` commits its update; 0 is the opening."""
    last = index == len(stack.gates)
    return Boundary(
        stack.gates[index - 1] if index else None,
        stack.entries[index],
        jnp.int32(index),
        jnp.int32(0 if last else index + 1),
        jnp.float32(progress),
        len(stack.gates),
    )


def streams(stack: Stack, embedding, updates, progress: float = 1.0) -> list:
    """The stream after opening and after every update."""
    stream = stack.scheme.open(jnp.asarray(embedding), boundary(stack, 0, progress), stack.ends)
    seen = [stream]
    for index, update in enumerate(updates, 1):
        stream, _ = stack.scheme.advance(stream, jnp.asarray(update), boundary(stack, index, progress))
        seen.append(stream)
    return seen


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_rows_close(got, want, differ: float = 0.0, terms: int = 1, chain: int = 12):
    """Every element, in units of its row's RMS, to the rounding of a chain of at most a dozen sublayers; `differ` is
    what the mathematics may. Sums of squares have nothing that cancels: their rounding does not grow with their size.
    """
    rel = differ + relative(terms, chain)
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    assert got.shape == want.shape
    rms = np.sqrt(np.mean(want**2, axis=-1, keepdims=True))
    worst = np.max(np.abs(got - want) / np.maximum(rms, 1e-30))
    assert worst <= rel, f"off by {worst:.2e} of a row's RMS, {rel:.0e} allowed"
