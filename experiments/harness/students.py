"""Networks of the inverse-depth toy: one MLP per block on Gaussian inputs, and the kinds of residual around it.

    x <- rms(x);   l times: the kind's step with f(x) = W2 relu(W1 x + b1)^2;   x <- rms(x)

`rms` has no gain. Matrices start as in torch's Linear, uniform in +-1/sqrt(fan in), except W2, which starts at 0 in all
kinds but NAG's. NAG's gates start as nagjax's do, except for alpha.
"""

from typing import Any, ClassVar, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

WIDTH, HIDDEN = 32, 128


class Blocks(NamedTuple):
    """Stacked blocks."""

    up: Float[Array, "L D F"]
    bias: Float[Array, "L F"]
    down: Float[Array, "L F D"]


def rms(x: Float[Array, "... D"]) -> Float[Array, "... D"]:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6)


def branch(block: Blocks, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
    """The output of a block's MLP for its (normalised) input."""
    return jax.nn.relu(x @ block.up + block.bias) ** 2 @ block.down


def linear(key: Array, fan_in: int, *shape: int) -> Array:
    return jax.random.uniform(key, shape, minval=-(fan_in**-0.5), maxval=fan_in**-0.5)


def start_blocks(key: Array, depth: int, scale: float) -> Blocks:
    """Initial values of `depth` blocks; `scale` multiplies the down projections."""
    up, bias, down = jax.random.split(key, 3)
    return Blocks(
        linear(up, WIDTH, depth, WIDTH, HIDDEN),
        linear(bias, WIDTH, depth, HIDDEN),
        scale * linear(down, HIDDEN, depth, HIDDEN, WIDTH),
    )


class Kind(Protocol):
    """A kind of residual: its parameters, and how it maps inputs to final states."""

    rates: Any  # learning rates of the parameters relative to the matrices': one, or a tree of them

    def start(self, key: Array, depth: int) -> Any:
        """Initial values of `depth` blocks."""

    def states(self, blocks: Any, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
        """Final normalised states."""


class Ordinary:
    """`x <- x + f(rms(x))`. It starts as the identity, because the down projections are zero."""

    rates: ClassVar[Any] = 1.0

    def start(self, key: Array, depth: int) -> Blocks:
        return start_blocks(key, depth, 0.0)

    def states(self, blocks: Blocks, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
        def step(x, block):
            return x + branch(block, rms(x)), None

        return rms(jax.lax.scan(step, rms(x), blocks)[0])


class Midpoint(Ordinary):
    """Second order: `x <- x + f2(rms(x + f1(rms(x))/2))`, blocks 2i and 2i+1 being f1 and f2."""

    def states(self, blocks: Blocks, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
        def step(x, pair):
            first, second = (jax.tree.map(lambda leaf, i=i: leaf[i], pair) for i in (0, 1))
            return x + branch(second, rms(x + branch(first, rms(x)) / 2)), None

        pairs = jax.tree.map(lambda leaf: leaf.reshape(-1, 2, *leaf.shape[1:]), blocks)
        return rms(jax.lax.scan(step, rms(x), pairs)[0])


class LayerNormScaling(Ordinary):
    """`x <- x + f_l(rms(x) / sqrt(l))`, l = 1, 2, ...; the last norm is not scaled (Sun et al. 2025,
    arXiv:2502.05795)."""

    def states(self, blocks: Blocks, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
        def step(x, own):
            block, scale = own
            return x + branch(block, scale * rms(x)), None

        scales = jnp.arange(1.0, len(blocks.bias) + 1.0) ** -0.5
        return rms(jax.lax.scan(step, rms(x), (blocks, scales))[0])


class Gate(NamedTuple):
    """NAG's modulators `m(r) = (sum_c p_c sigmoid(<r, w_c> + b_c)) ** beta`, with p = softmax(logits), and its step
    sizes."""

    weight: Float[Array, "L D C"]
    bias: Float[Array, "L C"]
    logits: Float[Array, "L C"]
    beta: Float[Array, " L"]  # before softplus, which gives the power
    alpha: Float[Array, " L"]


class Gated(NamedTuple):
    blocks: Blocks
    gate: Gate


class NormAgnostic:
    """NAG (Figliolia & Millidge 2026, arXiv:2606.16112): `r <- (r + t n) / sqrt(1 + t^2)`, with n the part of f(r)
    orthogonal to r at unit RMS, and t = alpha_l m_l(r); the final state is the direction r.

    Unlike in a language model nothing is centred, because inputs and targets of the toy have means. No log-norm is
    kept, because nothing reads it. A zero down projection would make n = 0/0, so it starts as torch's Linear, too; its
    length does not change the function, but how fast the direction learns, which the rates compensate. The gates start
    as those of `nagjax.residual.schemes.nag`, except alpha_l, which is a tenth of the l ** -0.5 there, so that the
    student starts near the identity, as the others do.
    """

    rates: ClassVar[Any] = Gated(6.0, 6.0 / 12)
    directions: ClassVar[int] = 32

    def start(self, key: Array, depth: int) -> Gated:
        blocks, gate = jax.random.split(key)
        shape = depth, self.directions
        made = Gate(
            jax.random.normal(gate, (depth, WIDTH, self.directions)) * WIDTH**-0.5,
            jnp.zeros(shape),
            jnp.zeros(shape),
            jnp.full(depth, jnp.log(jnp.e - 1.0)),
            0.1 * jnp.arange(1.0, depth + 1.0) ** -0.5,
        )
        return Gated(start_blocks(blocks, depth, 1.0), made)

    def states(self, blocks: Gated, x: Float[Array, "B D"]) -> Float[Array, "B D"]:
        def step(r, own):
            return turned(r, branch(own.blocks, r), turn(own.gate, r)), None

        return jax.lax.scan(step, rms(x), blocks)[0]


def turn(gate: Gate, r: Float[Array, "B D"]) -> Float[Array, "B 1"]:
    """The tangent [B, 1] of the angle by which a block turns each state."""
    mixture = jax.nn.sigmoid(r @ gate.weight + gate.bias) @ jax.nn.softmax(gate.logits)
    return gate.alpha * (jnp.maximum(mixture, 1e-6) ** jax.nn.softplus(gate.beta))[..., None]


def turned(r: Float[Array, "B D"], u: Float[Array, "B D"], t: Float[Array, "B #1"]) -> Float[Array, "B D"]:
    """A unit-RMS state turned by arctan t towards u; unchanged if t or u is 0."""
    u = u - jnp.mean(u * r, axis=-1, keepdims=True) * r
    return rms(r + t * rms(u))  # divides by the measured norm, so that nothing drifts


KINDS: dict[str, Kind] = {
    "ordinary": Ordinary(),
    "midpoint": Midpoint(),
    "lns": LayerNormScaling(),
    "nag": NormAgnostic(),
}
