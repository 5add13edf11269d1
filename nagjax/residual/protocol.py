"""The residual scheme protocol: what a stream is, and the methods that carry it through depth.

A *stream* is a pytree whose leaves all start with `[batch, tokens, ...]`. A scheme is a frozen dataclass (its fields
are its options) that must define five methods:

    open(embedding, at, ends)   -> stream          start the stream
    read(stream)                -> x               what the next branch reads, [B, T, D]
    advance(stream, update, at) -> stream, gate    commit the branch's update
    close(stream, ends)         -> hidden, log_scale    what the head reads, and the log of a factor on its logits
    lanes(stream)               -> direction, log_rms    the residual as telemetry measures it

All other methods have defaults: no parameters, ordinary initial values, Mixture-of-Depths, no constraints on
parameters. The class attributes `turns` and `rebuilds` declare what only some schemes can do.

A *sublayer* is one branch together with the step that commits its update: in our Transformer an attention or an MLP.
Sublayers count from 1. A *reader* is whatever reads the stream next: a sublayer or the head. Parameters come in three
groups: `entry` normalises a reader's input, `gate` commits a sublayer's update, and `ends` is one set per model.
`advance` gets the entry of the *next* reader, so that it commits an update and normalises for the next read in one pass
over memory.
"""

import abc
import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from nagjax.errors import UserError
from nagjax.parameters import parameter
from nagjax.ranges import check_fields
from nagjax.residual.rows import put

Stream = Any  # a pytree of arrays, each [B, T, ...]


class Nothing(nnx.Module):
    """No parameters."""


class SublayerIndex(NamedTuple):
    """Where a sublayer stands in depth, for initial values that depend on it."""

    index: Int[Array, ""] | int  # 1-based; traced while the blocks are initialised
    sublayers: int  # number of sublayers of the model

    @property
    def block(self) -> Int[Array, ""] | int:
        """The sublayer's block, 1-based."""
        return (self.index + 1) // 2

    @property
    def blocks(self) -> int:
        return (self.sublayers + 1) // 2


class Boundary(NamedTuple):
    """The place in depth (and in training) at which an update is committed. `open` gets a boundary, too, with `gate`
    None and `index` 0."""

    gate: Any  # parameters of the sublayer whose update is committed, as the scheme's `gate` makes them
    entry: Any  # parameters of the next reader, as `entry` makes them
    index: Int[Array, ""]  # the sublayer whose update is committed, 1-based
    following: Int[Array, ""]  # the next reader's index; 0 is the head
    progress: Float[Array, ""]  # share of the training done: 0 at the start, 1 in a finished model
    sublayers: Int[Array, ""] | int  # number of sublayers; for a pruned model the number before pruning
    projected: Float[Array, "B T C"] | None = None  # the product of `projection`, if the branch computed it

    @property
    def blocks(self) -> Int[Array, ""] | int:
        """The number of pairs of sublayers; the last block may have only one sublayer."""
        return (self.sublayers + 1) // 2

    @property
    def ends_block(self) -> Bool[Array, ""]:
        """Whether the sublayer is the last of its block."""
        return (self.index % 2 == 0) | (self.following == 0)


class Bridge(NamedTuple):
    """Which parameters a pruned model takes over at each place. Blocks are named by their 0-based numbers before the
    removal.

    gates: for each block that stays, the block whose second gate it takes. entries: for each reader (the blocks that
    stay, then the head), the block whose first entry it takes; the number of blocks before the removal stands for the
    head's own entry.
    """

    gates: list[int]
    entries: list[int]


@dataclasses.dataclass(frozen=True)
class Scheme(abc.ABC):
    """Base of all schemes. A subclass must define the five methods that come first, and may define the others."""

    name: ClassVar[str] = ""  # the file's name
    title: ClassVar[str] = ""  # its name in tables and plots
    learning_rate: ClassVar[float] = 8e-3  # AdamW's default, the best tried at 24 blocks x 64 (experiments/LOG.md)
    gate_rate: ClassVar[float] = 1.0  # learning rate of the parameters of role "gate", as a factor on the peak rate
    router: ClassVar[str] = "linear"  # default router of Mixture-of-Depths
    scale_free: ClassVar[bool] = False  # only an update's direction matters: a router that scales it cannot learn
    turns: ClassVar[bool] = False  # `turn` is defined: an update's rotation angle is known before its branch runs
    rebuilds: ClassVar[bool] = True  # `rebuild` is valid: the residual alone determines the whole stream

    def __post_init__(self):
        check_fields(self, "scheme.")

    # The five methods that every scheme defines.

    @abc.abstractmethod
    def open(self, embedding: Float[Array, "B T D"], at: Boundary, ends: nnx.Module) -> Stream:
        """The stream before the first sublayer. The embedding has the dtype of the residual."""

    @abc.abstractmethod
    def read(self, stream: Stream) -> Float[Array, "B T D"]:
        """What the next branch reads, in the dtype of the residual."""

    @abc.abstractmethod
    def advance(
        self, stream: Stream, update: Float[Array, "B T D"], at: Boundary
    ) -> tuple[Stream, Float[Array, "#B #T #D"]]:
        """The stream after a sublayer, ready for the next reader, and the gate that scaled the update (ones for a
        scheme without a gate). The stream must keep its structure, shapes and dtypes."""

    @abc.abstractmethod
    def close(self, stream: Stream, ends: nnx.Module) -> tuple[Float[Array, "B T D"], Float[Array, "B T"]]:
        """What the head reads, and the logarithm of the factor on its logits, float32."""

    @abc.abstractmethod
    def lanes(self, stream: Stream) -> tuple[Float[Array, "B T D"], Float[Array, "B T"]]:
        """The residual's direction (unit RMS) and log RMS, both float32. Telemetry measures these."""

    # Parameters.

    def entry(self, width: int, rngs: nnx.Rngs) -> nnx.Module:
        """The parameters that normalise a reader's input."""
        return Nothing()

    def gate(self, width: int, sublayer: SublayerIndex, rngs: nnx.Rngs) -> nnx.Module:
        """The parameters that commit a sublayer's update."""
        return Nothing()

    def projection(self, stream: Stream, at: Boundary) -> tuple[Float[Array, "B T D"], Float[Array, "D C"]] | None:
        """The two factors of a matmul that `advance` needs. If the first factor is the array that `read` returns, a
        branch may compute this product along with its own matmul: `advance` then finds the result in the boundary's
        `projected`, in the dtype of that array. Otherwise `projected` is None, and `advance` computes the product
        itself."""
        return None

    def ends(self, width: int, embedding_std: float, rngs: nnx.Rngs) -> nnx.Module:
        """The parameters that a model has once."""
        return Nothing()

    def ends_for(self, ends: nnx.Module, sublayers: int) -> nnx.Module:
        """The result of `ends`, adjusted if its initial values depend on the number of sublayers."""
        return ends

    def constrain(self, value: Float[Array, "..."], axes: tuple[str | None, ...], role: str) -> Float[Array, "..."]:
        """Projects a parameter onto the values it may have, at initialisation and after every optimizer step. `axes`
        names the parameter's last axes; `role` is its group in the optimizer."""
        return value

    @property
    def constrains(self) -> bool:
        """Whether the scheme defines `constrain`."""
        return type(self).constrain is not Scheme.constrain

    # Initial values, and the learning rate that goes with them.

    def output_scale(self, sublayer: SublayerIndex) -> Float[Array, ""] | float:
        """Factor on the initial values of a branch's output projection."""
        return 1.0

    def inner_scale(self, sublayer: SublayerIndex) -> Float[Array, ""] | float:
        """Factor on the initial values of the map that a branch's output is linear in: attention's values, the MLP's up
        projection."""
        return 1.0

    def depth_ratio(self, depth: int) -> tuple[float, float] | None:
        """For a scheme that weights every update by n^-a (CompleteP): n, the depth (in blocks) relative to the scheme's
        base depth, and the exponent a. None: the scheme has another rule for depth."""
        return None

    def embedding_std(self, width: int) -> float:
        """Standard deviation of the initial embedding if it is not the head's table, too.

        The default is the scale of a normalised residual. With 1/sqrt(D), the first updates of an unscaled pre-norm
        model are several times as large as the embedding and drown it (experiments/LOG.md).
        """
        return 1.0

    def default_rate(self, width: int, depth: int) -> float:
        """Peak learning rate for a model of this size: `learning_rate` (chosen at 24 blocks x 64), times 64/width.
        depth: number of blocks."""
        return self.learning_rate * 64 / width

    def trained(self) -> "Scheme":
        """The scheme for further training: it omits what this scheme does only early in training."""
        return self

    def head_rows(self, table: Float[Array, "V D"]) -> Float[Array, "V D"]:
        """The unembedding table as the head uses it."""
        return table

    # Mixture-of-Depths.

    def skip(self, stream: Stream, at: Boundary) -> Stream:
        """The stream after a sublayer that did not run. The residual does not change; if the stream carries a
        normalised input, `skip` prepares it for the next reader."""
        return stream

    def advance_rows(
        self, stream: Stream, rows: Stream, update: Float[Array, "B k D"], at: Boundary, indices: Int[Array, "B k"]
    ) -> tuple[Stream, Float[Array, "#B #k #D"]]:
        """`advance` for the tokens at the indices and `skip` for all others. `rows` is the part of the stream at the
        indices."""
        after, gate = fitting_result(self, rows, update.shape, self.advance(rows, update, at))
        return put(self.skip(stream, at), after, indices), gate

    def turn(self, stream: Stream, at: Boundary) -> Float[Array, "B T"]:
        """Tangent of the angle by which the sublayer will rotate each token, float32. Raises UserError unless the
        scheme declares `turns`."""
        raise UserError("scheme", self.name, "has no rotation angle that is known before a branch runs: use nag")

    # Measuring depth, and changing it.

    def rebuild(self, residual: Float[Array, "B T D"], at: Boundary, ends: nnx.Module) -> Stream:
        """The inverse of `lanes`: the stream that has this residual, ready for the reader of `at`. Valid only for
        schemes that declare `rebuilds`: the stream of the others has more, such as its history, which cannot be
        recovered."""
        return self.open(residual, at, ends)

    def bridge(self, stays: Sequence[int], places: Sequence[int], blocks: int) -> Bridge:
        """Which parameters make a model without some blocks equal to the full model in which all tokens `skip` these
        blocks. By default every block keeps its own parameters. stays: the blocks that stay, ascending. places: for
        every block, its 0-based place among the `blocks` that the model had before any pruning."""
        return Bridge(list(stays), [*stays, len(places)])


def split_lanes(residual: Float[Array, "B T D"]) -> tuple[Float[Array, "B T D"], Float[Array, "B T"]]:
    """Direction (unit RMS) and log RMS of an ordinary residual, both float32."""
    residual = residual.astype(jnp.float32)
    rms = jnp.sqrt(jnp.mean(residual**2, axis=-1) + 1e-30)
    return residual / rms[..., None], jnp.log(rms)


def _root(square: Float[Array, "B T"]) -> Float[Array, "B T"]:
    """Square root with gradient 0 at 0, where the sublayer has done nothing."""
    still = square == 0
    return jnp.where(still, 0.0, jnp.sqrt(jnp.where(still, 1.0, square)))


def turn_angle(before: Float[Array, "B T D"], after: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """Angle in radians between two unit-RMS directions. Unlike arccos of the cosine, it is exact for small angles."""
    half_chord = 0.5 * _root(jnp.mean((after - before) ** 2, axis=-1))
    return 2.0 * jnp.arcsin(jnp.clip(half_chord, 0.0, 1.0))


def telemetry(
    scheme: Scheme, before: Stream, after: Stream, gate: Array, real: Bool[Array, "B T"] | None = None
) -> dict[str, Float[Array, ""]]:
    """Telemetry of one sublayer, float32 scalars, each an average over the `real` tokens (default: all).

    turn: angle between the residual before and after the sublayer, radians. ratio: norm of the step over the norm of
    the residual before it (NAG's |t|). growth: change of the residual's log RMS. log_norm: log RMS after the sublayer.
    gate: mean gate. closed: share of tokens whose mean gate is below 0.05.
    """
    (d0, s0), (d1, s1) = scheme.lanes(before), scheme.lanes(after)
    real = jnp.ones(s0.shape, bool) if real is None else real
    growth = jnp.where(real, s1 - s0, 0.0)  # after a row of zeros it may be so large that exp overflows
    step = jnp.exp(growth)[..., None] * d1 - d0
    gate = mean_gate(gate, d0)
    by_token = {
        "turn": turn_angle(d0, d1),
        "ratio": _root(jnp.mean(step**2, axis=-1)),
        "growth": growth,
        "log_norm": s1,
        "gate": gate,
        "closed": (gate < 0.05).astype(jnp.float32),
    }
    count = jnp.maximum(jnp.sum(real), 1)
    return {name: jnp.sum(jnp.where(real, value, 0.0)) / count for name, value in by_token.items()}


def mean_gate(gate: Float[Array, "#B #T #D"] | Float[Array, ""], x: Float[Array, "B T D"]) -> Float[Array, "B T"]:
    """Each token's gate, averaged over features, float32."""
    gate = jnp.asarray(gate, jnp.float32)
    return jnp.broadcast_to(jnp.mean(gate, axis=-1) if gate.ndim else gate, x.shape[:-1])


def gate_parameter(value: jax.Array, axes: tuple[str | None, ...]) -> nnx.Param:
    """A float32 parameter of role "gate": it has no weight decay by default, and learns at the scheme's `gate_rate`."""
    return parameter(jnp.asarray(value, jnp.float32), axes, "gate")


def fitting_result(scheme: Scheme, stream: Stream, shape: tuple[int, ...], result: Any) -> tuple[Stream, Array]:
    """Returns the result of `advance`. Raises UserError unless it is a pair of a stream like the one before it and a
    gate."""
    if not isinstance(result, tuple) or len(result) != 2 or hasattr(result, "_fields"):
        raise _returned(scheme, type(result).__name__, "a pair: the stream and the gate")
    after, gate = result
    if jax.tree.structure(after) != jax.tree.structure(stream):
        raise _returned(scheme, type(after).__name__, f"a stream such as it was given, a {type(stream).__name__}")
    was, now = ([(jnp.shape(x), jnp.result_type(x).name) for x in jax.tree.leaves(own)] for own in (stream, after))
    if was != now:
        raise _returned(scheme, now, f"a stream of the shapes and dtypes that it was given, {was}")
    try:
        fits = gate is not None and jnp.broadcast_shapes(jnp.shape(gate), shape) == shape
    except (TypeError, ValueError):
        fits = False
    if not fits:
        raise _returned(scheme, getattr(gate, "shape", gate), f"as its gate what broadcasts to {shape}")
    return after, gate


def _returned(scheme: Scheme, value: Any, what: str) -> UserError:
    return UserError(f"{scheme.name}.advance", value, f"has to return {what}")
