"""NAG, the norm-agnostic residual: it keeps direction and log-norm apart, and every update is a controlled rotation."""

import dataclasses
import math
from typing import Annotated, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.scipy.special import logit
from jaxtyping import Array, Float

from nagjax.ranges import Count, NonNegative, Range
from nagjax.residual.protocol import Boundary, Scheme, gate_parameter, split_lanes
from pallas_kernels import nag_update, nag_update_modulated, nag_update_rows
from pallas_kernels.ops.nag_update import EPS_UPDATE

HEAD_SPREAD = 0.5  # standard deviation of the first logits: the start loss is about log V + 0.125 nats
MIXTURE_FLOOR = 1e-6  # x ** beta has an infinite derivative at 0


class NAGStream(NamedTuple):
    """`direction` has unit RMS and mean 0; the ordinary residual would be `exp(log_norm) * direction`."""

    direction: Float[Array, "B T D"]
    log_norm: Float[Array, "B T"]


def _lanes_at_start(centred: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Float[Array, "B T"]]:
    """`split_lanes`, with another gradient for rows of zeros. Such a row has no direction, and the factor 1/rms, up to
    1e15, would let its gradient dominate that of the whole batch. As in `nag_update`, its gradient is that of a row
    that is not normalised."""
    live = jnp.mean(centred**2, axis=-1, keepdims=True) > EPS_UPDATE
    fixed = jax.lax.stop_gradient(centred)
    direction, log_norm = split_lanes(jnp.where(live, centred, fixed))
    return direction + jnp.where(live, 0.0, centred - fixed), log_norm


def _kept(direction: Float[Array, "B T D"], log_norm: Float[Array, "B T"]) -> NAGStream:
    """The stream with a float32 log-norm: an op returns a float64 one for float64 rows, but the carry of a scan must
    keep its dtype."""
    return NAGStream(direction, log_norm.astype(jnp.float32))


class Modulator(nnx.Module):
    """`m(r) = (sum_c p_c sigmoid(<r, w_c> + b_c)) ** beta` in [0, 1], and the step size alpha (Eq. 13, 23-24)."""

    def __init__(self, width: int, directions: int, alpha: Float[Array, ""], rngs: nnx.Rngs):
        weight = jax.random.normal(rngs.params(), (width, directions), jnp.float32) * width**-0.5
        self.weight = gate_parameter(weight, ("embed", None))
        self.bias = gate_parameter(jnp.zeros((directions,)), (None,))
        self.logits = gate_parameter(jnp.zeros((directions,)), (None,))
        self.beta = gate_parameter(jnp.float32(math.log(math.e - 1.0)), ())  # softplus of it is 1
        self.alpha = gate_parameter(jnp.asarray(alpha, jnp.float32), ())

    def __call__(self, direction: Float[Array, "B T D"]) -> Float[Array, "B T"]:
        return self.of(direction @ self.weight[...].astype(direction.dtype))

    def of(self, product: Float[Array, "B T C"]) -> Float[Array, "B T"]:
        """m, given the product of the direction with `weight`. Float32."""
        _, bias, logits, beta = self.wide()
        gates = jax.nn.sigmoid(product.astype(jnp.float32) + bias)
        mixture = jnp.dot(gates, jax.nn.softmax(logits), precision="highest")
        # exp and log instead of a power, whose gradient on a CPU takes longer than all the rest of this function.
        return jnp.exp(beta * jnp.log(jnp.maximum(mixture, MIXTURE_FLOOR)))

    def wide(self) -> tuple[Float[Array, "D C"], Float[Array, " C"], Float[Array, " C"], Float[Array, ""]]:
        """Weight, bias, logits and softplus(beta), all float32."""
        weight, bias, logits, beta = (
            own[...].astype(jnp.float32) for own in (self.weight, self.bias, self.logits, self.beta)
        )
        return weight, bias, logits, jax.nn.softplus(beta)

    def held_at(self, mean: Float[Array, "*L 1"]) -> dict[str, Float[Array, "..."]]:
        """The parameter values with which m is `mean` for every token."""
        mixture = mean ** (1.0 / jax.nn.softplus(self.beta[...]))[..., None]
        bias = jnp.broadcast_to(logit(mixture), self.bias[...].shape)
        return {"weight": jnp.zeros_like(self.weight[...]), "bias": bias}


class Ends(nnx.Module):
    """log G_encode (starts at 0) and the head's log gain (see `NAG`)."""

    def __init__(self, width: int, embedding_std: float):
        self.encode = gate_parameter(jnp.float32(0.0), ())
        start = 0.5 * math.log(width) - math.log(embedding_std) + math.log(HEAD_SPREAD)
        self.decode = gate_parameter(jnp.float32(start), ())


@dataclasses.dataclass(frozen=True)
class NAG(Scheme):
    """The norm-agnostic residual network, Figliolia & Millidge 2026, arXiv:2606.16112, Eq. 3-18.

        u      = f_l(r) - mean(f_l(r));   u_perp = u - (<u, r> / D) r;   n = u_perp / rms(u_perp)
        t      = alpha_l m_l(r)                                           # tan of the rotation angle
        r'     = (r + t n) / sqrt(1 + t^2);   s' = s + log(1 + t^2) / 2
        logits = exp(s_L + g) <r_L, W_v> / D,  rows W_v centred and of norm sqrt(D);   s_0 = log(G rms(embedding))

    Choices where the paper is silent: alpha rises linearly from 0 to its value over the first `ramp` of the training,
    and all gate parameters learn at `gate_rate` times the peak rate without weight decay (both prevent gates from
    closing early); the embedding is centred when it is looked up; the head's gain g is a learned scalar in log space,
    initialised so that the first logits have a standard deviation of one half at every width and depth. Only the sum of
    g and log G (G is the paper's gain on the embedding) affects the model; both learn, so the sum moves at twice their
    rate. An update of zeros has no direction: it leaves r unchanged and still adds to s, so a branch whose last layer
    starts at 0 makes the logits sharper until this layer has moved.
    """

    name: ClassVar[str] = "nag"
    title: ClassVar[str] = "NAG"
    learning_rate: ClassVar[float] = 1.6e-2
    gate_rate: ClassVar[float] = 1 / 12
    router: ClassVar[str] = "nag"
    scale_free: ClassVar[bool] = True
    turns: ClassVar[bool] = True

    directions: Count = 32  # number of directions of each modulator (C)
    alpha_power: NonNegative = 0.5  # p: alpha of sublayer l starts at l ** -p; with 1 it is `nag_harmonic`
    ramp: Annotated[float, Range(ge=0, lt=1)] = 0.05  # share of the training in which alpha rises from 0

    def default_rate(self, width, depth):
        """It falls with depth beyond 24 blocks: every branch is scale-free, so all branches move at each step, whatever
        their number."""
        return super().default_rate(width, depth) * min(1.0, 24 / depth)

    def trained(self):
        return dataclasses.replace(self, ramp=0.0)

    def gate(self, width, sublayer, rngs):
        alpha = jnp.asarray(sublayer.index, jnp.float32) ** -self.alpha_power
        return Modulator(width, self.directions, alpha, rngs)

    def embedding_std(self, width):
        """Branches read only the embedding's direction; its length only sets how fast the direction can learn."""
        return width**-0.5

    def ends(self, width, embedding_std, rngs):
        return Ends(width, embedding_std)

    def ends_for(self, ends, sublayers):
        """Without a ramp, the rotations lengthen the log-norm from the first step on. The head's log gain is lowered by
        the expected amount, with every modulator at about one half."""
        if not self.ramp:
            turns = (0.5 * index**-self.alpha_power for index in range(1, sublayers + 1))
            ends.decode[...] = ends.decode[...] - sum(0.5 * math.log1p(turn * turn) for turn in turns)
        return ends

    def head_rows(self, table):
        centred = table - jnp.mean(table, axis=-1, keepdims=True)
        return centred * jax.lax.rsqrt(jnp.mean(centred**2, axis=-1, keepdims=True) + 1e-12)

    def open(self, embedding, at: Boundary, ends) -> NAGStream:
        wide = embedding.astype(jnp.float32)
        direction, log_norm = _lanes_at_start(wide - jnp.mean(wide, axis=-1, keepdims=True))
        return NAGStream(direction.astype(embedding.dtype), log_norm + ends.encode[...])

    def rebuild(self, residual, at: Boundary, ends) -> NAGStream:
        direction, log_norm = split_lanes(residual)
        return NAGStream(direction.astype(residual.dtype), log_norm)

    def read(self, stream: NAGStream):
        return stream.direction

    def alpha(self, at: Boundary) -> Float[Array, ""]:
        """The sublayer's step size at this point of the training, float32."""
        ramp = jnp.minimum(at.progress / self.ramp, 1.0) if self.ramp else 1.0
        return ramp * at.gate.alpha[...].astype(jnp.float32)

    def turn(self, stream: NAGStream, at: Boundary) -> Float[Array, "B T"]:
        """Tangent of the angle by which the sublayer will rotate each token, float32: it is known before the branch
        runs."""
        return self.alpha(at) * self._opened(stream, at)

    def _opened(self, stream: NAGStream, at: Boundary) -> Float[Array, "B T"]:
        """m, from the boundary's `projected` if the branch has computed that."""
        return at.gate(stream.direction) if at.projected is None else at.gate.of(at.projected)

    def projection(self, stream: NAGStream, at: Boundary):
        return stream.direction, at.gate.weight[...]

    def advance(self, stream: NAGStream, update, at: Boundary):
        own, rows = at.gate, (stream.direction, stream.log_norm, update)
        if at.projected is not None:
            gate = self._opened(stream, at)
            return _kept(*nag_update(*rows, self.alpha(at) * gate)), gate[..., None]
        direction, log_norm, _ = nag_update_modulated(*rows, *own.wide(), self.alpha(at))
        # Computes the gate again for telemetry; the compiler removes this unless it is read.
        return _kept(direction, log_norm), own(stream.direction)[..., None]

    def advance_rows(self, stream: NAGStream, rows: NAGStream, update, at: Boundary, indices):
        gate = self._opened(rows, at)
        turn = self.alpha(at) * gate
        direction, log_norm = nag_update_rows(stream.direction, stream.log_norm, update, turn, indices)
        return _kept(direction, log_norm), gate[..., None]

    def close(self, stream: NAGStream, ends):
        width = stream.direction.shape[-1]
        return stream.direction, stream.log_norm + ends.decode[...] - math.log(width)

    def lanes(self, stream: NAGStream):
        direction, _ = split_lanes(stream.direction)
        return direction, stream.log_norm
