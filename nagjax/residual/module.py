"""Residual schemes as Flax modules for your own branches: `nagjax.NAG`, `nagjax.Review`, ..., one for each scheme.

    class Mixer(nnx.Module):
        def __init__(self, rngs):
            self.branches = nnx.List([...])                                   # 24 callables [..., 512] -> [..., 512]
            self.residual = nagjax.NAG(width=512, sublayers=24, rngs=rngs)

        def __call__(self, x, progress):
            return self.residual(x, self.branches, progress=progress)

The module holds the scheme's parameters and offers the methods of `nagjax.residual.protocol`. It commits updates with
the same kernels as `nagjax.Transformer`. `nagjax.NAG.Scheme` is the scheme itself, a frozen dataclass of its options.
"""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import jax
import jax.core
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Float, Int

from nagjax.errors import UserError
from nagjax.layers.branch import Update, fitting
from nagjax.layers.embedding import unembed
from nagjax.layers.parameters import Scales
from nagjax.parameters import STACKED, check_rngs, label
from nagjax.ranges import Count, Positive, check_value
from nagjax.residual import Scheme, Stream
from nagjax.residual.arguments import folded, say, share_done
from nagjax.residual.protocol import Boundary, SublayerIndex, telemetry
from nagjax.residual.registry import find_scheme, schemes
from nagjax.residual.stacks import changed, refused, stacks_of_one, unstacked, values
from nagjax.residual.sublayer import run

Branch = Callable[[Float[Array, "*lead D"]], Float[Array, "*lead D"]]


class Slot(NamedTuple):
    """What `advance` needs for one sublayer: its `gate` parameters, the next reader's `entry` parameters, and the
    numbers of both (1-based; 0 is the head). `Residual.slots` returns all slots in one, with leaves [S, ...]."""

    gate: nnx.Module
    entry: nnx.Module
    index: Int[Array, ""]
    following: Int[Array, ""]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OpenStream:
    """A stream between two sublayers: the scheme's arrays [B, T, ...], the share of the training done (float32), and
    the leading axes of x. It is a pytree, so a scan may carry it."""

    rows: Stream
    progress: Float[Array, ""]
    lead: tuple[int, ...] = dataclasses.field(metadata={"static": True})

    def replaced(self, rows: Stream) -> "OpenStream":
        return dataclasses.replace(self, rows=rows)


class Asked:
    """Which methods the user has called. All instances compare equal, so that this makes no two modules differ."""

    start_factors = False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Asked)

    def __hash__(self) -> int:
        return 0


class Residual(nnx.Module):
    """A residual scheme for `sublayers` branches on hidden states of `width` features.

    scheme: a name, a scheme with its options (`nagjax.NAG.Scheme(directions=16)`), or a scheme's class.

    width: D, features of x. sublayers: S, number of branches. rngs: `nnx.Rngs(seed)`, whose stream `params` draws the
    initial values. embedding_std: RMS of the x that opens the stream (None: 1/sqrt(width) in NAG, like its embedding);
    it sets only the initial gain of NAG's `logits`. Raises UserError for an invalid argument or an unknown option.

    Schemes that count blocks (LNS, DeepNorm, ...) take a pair of sublayers as a block, as in a Transformer.

    Parameters: `gate` [S, ...] of each sublayer, `entry` [S + 1, ...] of each reader (the last is the head), `ends`.
    Sublayers count from 1. x may have any leading axes: [D], [N, D], [B, H, W, D]. Under a mesh, wrap the step in
    `pallas_kernels.shard_rows`.
    """

    def __init__(
        self,
        scheme: "str | Scheme | type[Scheme]",
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = None,
    ):
        for field, value in (("width", width), ("sublayers", sublayers)):
            check_value(field, value, Count)
        check_value("embedding_std", embedding_std, Positive | None)
        check_rngs(rngs)
        width, sublayers = int(width), int(sublayers)
        self.scheme, self.width, self.sublayers = as_scheme(scheme), width, sublayers
        self.asked = Asked()
        gate = lambda index, rngs: self.scheme.gate(width, SublayerIndex(index, sublayers), rngs)  # noqa: E731
        self.gate = nnx.vmap(gate, transform_metadata=STACKED)(jnp.arange(1, sublayers + 1), rngs.split(sublayers))
        entry = nnx.vmap(lambda rngs: self.scheme.entry(width, rngs), transform_metadata=STACKED)
        self.entry = entry(rngs.split(sublayers + 1))
        std = self.scheme.embedding_std(width) if embedding_std is None else embedding_std
        self.ends = self.scheme.ends_for(self.scheme.ends(width, std, rngs), sublayers)
        label(self)

    def __call__(
        self,
        x: Float[Array, "*lead D"],
        branches: Sequence[Branch] | nnx.Module,
        *,
        progress: float | Float[Array, ""] | None = None,
        observe: bool = False,
        remat: bool = False,
    ) -> Any:
        """Runs x [*lead, D] through all sublayers and returns the result [*lead, D] in x's dtype. With `observe` it
        also returns telemetry, {name: [S] float32} (see `nagjax.residual.protocol.telemetry`); each average omits the
        rows that are all zeros before the sublayer.

        branches: a list of S callables, which are unrolled; or stacked modules (`nnx.vmap`), which are scanned: one
        with parameters [S, ...], or a list of k < S modules with parameters [S / k, ...], which alternate. A stacked
        module's other state (dropout keys, statistics) is updated, too. progress: share of the training done, 0 to 1.
        Default 1, with a warning if the scheme behaves differently early in training. remat: recompute each scanned
        block in the backward pass.

        The residual keeps the dtype of x, whatever the dtype of the updates.

        Raises UserError if x has another width or is not floating, if the branches are not S sublayers, for a progress
        outside of [0, 1], for `remat` with a list of S callables, and if a branch returns another shape than it reads,
        or numbers that are not floating.
        """
        stream = self.open(x, progress)
        listed = isinstance(branches, Sequence | nnx.List) and len(branches) == self.sublayers
        if listed and not stacks_of_one(branches):
            if remat:
                raise UserError("remat", remat, "wrap the branches themselves (nnx.remat), or stack them")
            stream, facts = self._unrolled(stream, branches, observe)
        else:
            stream, facts = self._scanned(stream, branches, observe, remat)
        hidden = self.close(stream)
        return (hidden, facts) if observe else hidden

    def open(self, x: Float[Array, "*lead D"], progress: float | Float[Array, ""] | None = None) -> OpenStream:
        """Starts the stream before the first sublayer at this `progress`. Arguments and errors: see `__call__`."""
        x = jnp.asarray(x)
        if x.ndim < 1 or x.shape[-1] != self.width:
            raise UserError("x", x.shape, f"the last axis must have {self.width} features, the residual's width")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise UserError("x", x.dtype.name, "give floating-point numbers")
        if progress is None and self.scheme.trained() != self.scheme:
            say(f"{self.scheme.name} behaves differently early in training: {_how(self.scheme)}")
        progress = share_done(1.0 if progress is None else progress)
        first = jax.tree.map(lambda own: own[0], self.entry)
        at = Boundary(None, first, jnp.int32(0), jnp.int32(1), progress, self.sublayers)
        lead = x.shape[:-1]
        return OpenStream(self.scheme.open(folded(x, lead), at, self.ends), progress, lead)

    def read(self, stream: OpenStream, i: int | Int[Array, ""] = 1) -> Float[Array, "*lead D"]:
        """What the next sublayer reads, [*lead, D] in x's dtype. The stream itself tells which sublayer is next; i is
        only checked. Raises UserError for an i outside 1 .. S, unless it is traced."""
        checked(i, self.sublayers)
        return self.scheme.read(opened(stream).rows).reshape(*stream.lead, self.width)

    def advance(
        self, stream: OpenStream, update: Float[Array, "*lead D"], i: int | Int[Array, ""] | Slot
    ) -> OpenStream:
        """The stream after sublayer i. In your own scan, pass a slice of `slots()` instead of i: otherwise each step of
        the backward pass makes a gradient as large as all sublayers' parameters. Raises UserError for an i outside 1 ..
        S, unless it is traced, and for an update that is not floating or not of the shape that `read` returns."""
        return self._advanced(stream, update, i, observe=False)[0]

    def observe(
        self, stream: OpenStream, update: Float[Array, "*lead D"], i: int | Int[Array, ""] | Slot
    ) -> tuple[OpenStream, dict[str, Float[Array, ""]]]:
        """`advance`, and the sublayer's telemetry, float32 scalars. Under jit, unused values are not computed."""
        return self._advanced(stream, update, i, observe=True)

    def close(self, stream: OpenStream) -> Float[Array, "*lead D"]:
        """What a head reads after the last sublayer, [*lead, D] in x's dtype."""
        return self.scheme.close(opened(stream).rows, self.ends)[0].reshape(*stream.lead, self.width)

    def logits(self, stream: OpenStream, table: Float[Array, "V D"]) -> Float[Array, "*lead V"]:
        """Float32 logits of the scheme's own head over the rows of a table. NAG's head uses the residual's norm. Raises
        UserError for a table that is not [V, D]."""
        if np.ndim(table) != 2 or np.shape(table)[1] != self.width:
            raise UserError("table", np.shape(table), f"give a row of {self.width} features for each word")
        table = jnp.asarray(table)
        logits = unembed(*self.scheme.close(opened(stream).rows, self.ends), self.scheme.head_rows(table))
        return logits.reshape(*stream.lead, table.shape[0])

    def slots(self) -> Slot:
        """The slots of all sublayers, with leaves [S, ...]: the input of a scan over sublayers."""
        index = jnp.arange(1, self.sublayers + 1, dtype=jnp.int32)
        readers = jax.tree.map(lambda own: own[1:], self.entry)
        gate = jax.tree.map(lambda own: own, self.gate)  # a copy: nnx.scan refuses variables that the module also holds
        return Slot(gate, readers, index, jnp.where(index < self.sublayers, index + 1, 0))

    def start_factors(self, i: int | Int[Array, ""]) -> Scales:
        """Factors for the initial values of branch i (see `nagjax.start_factors`)."""
        self.asked.start_factors = True
        return start_factors(self.scheme, i, self.sublayers)

    def slot(self, i: int | Int[Array, ""]) -> Slot:
        """The slot of sublayer i. Raises UserError for an i outside 1 .. S, unless it is traced."""
        i = checked(i, self.sublayers)
        if isinstance(i, int):
            return jax.tree.map(lambda all: all[i - 1], self.slots())
        return jax.tree.map(lambda all: jax.lax.dynamic_index_in_dim(all, i - 1, keepdims=False), self.slots())

    def _advanced(
        self, stream: OpenStream, update: Float[Array, "*lead D"], i: int | Int[Array, ""] | Slot, observe: bool
    ) -> tuple[OpenStream, dict]:
        return self._step(opened(stream), lambda _: update, i if isinstance(i, Slot) else self.slot(i), observe)

    def _step(self, stream: OpenStream, branch: Branch, slot: Slot, observe: bool) -> tuple[OpenStream, dict]:
        def in_rows(x: Float[Array, "B T D"]) -> Update:
            x = x.reshape(*stream.lead, self.width)
            return Update(folded(fitting(branch(x), x), stream.lead, "update"))

        after = run(self.scheme, stream.rows, in_rows, Boundary(*slot, stream.progress, self.sublayers))
        if not observe:
            return stream.replaced(after.stream), {}
        some = jnp.any(self.scheme.lanes(stream.rows)[0] != 0, axis=-1)  # a step from a row of zeros has no ratio to it
        return stream.replaced(after.stream), telemetry(self.scheme, stream.rows, after.stream, after.gate, some)

    def _unrolled(
        self, stream: OpenStream, branches: Sequence[Branch] | nnx.List, observe: bool
    ) -> tuple[OpenStream, dict]:
        facts = []
        for branch, slot in zip(branches, unstacked(self.slots()), strict=True):
            if not callable(branch):
                raise UserError("branches", branch, f"give {self.sublayers} callables")
            stream, fact = self._step(stream, branch, slot, observe)
            facts.append(fact)
        return stream, jax.tree.map(lambda *each: jnp.stack(each), *facts)

    def _scanned(self, stream: OpenStream, branches: Any, observe: bool, remat: bool):
        stacks = list(branches) if isinstance(branches, Sequence | nnx.List) else [branches]
        kinds, modules = len(stacks), all(isinstance(stack, nnx.Module) for stack in stacks)
        blocks, rest = divmod(self.sublayers, max(kinds, 1))
        graph: Any = None
        params, state = {}, {}
        if modules:
            graph, params, state = nnx.split(tuple(stacks), nnx.Param, ...)
        lengths = {x.shape[:1] for x in jax.tree.leaves((params, state))}
        if not kinds or rest or lengths != {(blocks,)}:
            raise refused(branches, self.sublayers)

        def body(stream, xs):
            slots, params, state = xs
            old = values(state)  # before the merge: branches change these variables in place
            own, facts = nnx.merge(graph, params, state), []
            for j, branch in enumerate(own):
                stream, fact = self._step(stream, branch, jax.tree.map(lambda x, j=j: x[j], slots), observe)
                facts.append(fact)
            new = changed(old, nnx.split(own, nnx.Param, ...)[2])
            return stream, (jax.tree.map(lambda *each: jnp.stack(each), *facts), new)

        step = jax.checkpoint(body, prevent_cse=False) if remat else body
        slots = jax.tree.map(lambda x: x.reshape(blocks, kinds, *x.shape[1:]), self.slots())
        stream, (facts, new) = jax.lax.scan(step, stream, (slots, params, state))
        nnx.update(tuple(stacks), new)
        return stream, jax.tree.map(lambda x: x.reshape(-1), facts)


def start_factors(
    scheme: "Residual | str | Scheme | type[Scheme]", i: int | Int[Array, ""], sublayers: int | None = None
) -> Scales:
    """Factors for the initial values of your own branch at sublayer i, from the scheme's source (DeepNorm, Review, for
    `plain` GPT-2): `output` for the matrix that makes the update, `inner` for the map that the update is linear in
    (attention's values, the MLP's up projection).

        kernel_init = lambda *a: nagjax.start_factors(self.residual, i).output * lecun_normal()(*a)

    scheme: the module (nnx or Linen), which knows its number of sublayers; or a scheme, a scheme's class or a module's
    class, together with `sublayers`. i may be traced. Raises UserError for an i outside 1 .. S, unless it is traced,
    and for an invalid number of sublayers or one that differs from the module's.
    """
    own = getattr(scheme, "start_factors", None)
    if own is None:  # MixtureOfDepths wraps a module that has them
        own = getattr(getattr(scheme, "residual", None), "start_factors", None)
    if own is not None and not isinstance(scheme, type):
        if sublayers not in (None, own.__self__.sublayers):
            raise UserError("sublayers", sublayers, f"the module has {own.__self__.sublayers}: leave it out")
        return own(i)
    check_value("sublayers", sublayers, Count, "or give the module in place of the scheme")
    total = int(sublayers or 0)
    chosen, place = as_scheme(scheme), SublayerIndex(checked(i, total), total)
    return Scales(chosen.output_scale(place), chosen.inner_scale(place))


def checked(i: int | Int[Array, ""], sublayers: int) -> int | Int[Array, ""]:
    """Returns i, the number of a sublayer. Raises UserError unless i is traced or an integer from 1 to S."""
    if isinstance(i, jax.core.Tracer):
        return i
    try:
        number = operator.index(i)  # accepts an array, too
    except TypeError:
        raise UserError("i", i, "give a sublayer's number") from None
    if not 1 <= number <= sublayers:
        raise UserError("i", i, f"sublayers count from 1 to {sublayers}")
    return number


def as_scheme(given: "str | Scheme | type[Scheme] | Residual | type[Residual]") -> Scheme:
    """The scheme of a name, a scheme, a scheme's or module's class, or a module. Raises UserError for anything else."""
    if isinstance(given, str):
        return find_scheme(given)()
    if isinstance(given, Residual):
        return given.scheme
    if isinstance(given, type) and (own := getattr(given, "Scheme", None)):  # the class of an nnx or Linen module
        return own()
    if isinstance(given, type) and issubclass(given, Scheme):
        return given()
    if isinstance(given, Scheme):
        return given
    raise UserError("scheme", given, "give a name, a scheme, or a module such as nagjax.NAG")


def modules() -> "dict[str, type[Residual]]":
    """The nnx module of every scheme, by the name of its class: NAG, Review, LNS, ..."""
    return {scheme.__name__: module_of(scheme) for scheme in schemes().values()}


@functools.cache
def module_of(scheme: type[Scheme]) -> "type[Residual]":
    """The nnx module of a scheme: a `Residual` that takes the scheme's options instead of the scheme."""

    def __init__(
        self, width: int, sublayers: int, *, rngs: nnx.Rngs, embedding_std: float | None = None, **options: Any
    ):
        known = [field.name for field in dataclasses.fields(scheme)]
        if unknown := sorted({*options} - {*known}):
            raise UserError(unknown[0], options[unknown[0]], f"options of {scheme.name}: {', '.join(known) or 'none'}")
        Residual.__init__(self, scheme(**options), width, sublayers, rngs=rngs, embedding_std=embedding_std)

    plain = list(inspect.signature(__init__).parameters.values())[:-1]
    options = [
        inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=field.type)
        for field in dataclasses.fields(scheme)
    ]
    __init__.__qualname__ = f"{scheme.__name__}.__init__"  # errors about arguments name it
    vars(__init__)["__signature__"] = inspect.Signature(plain + options)
    doc = f"{inspect.getdoc(scheme)}\n\n{inspect.cleandoc(Residual.__doc__ or '').split('\n\n', 2)[2]}"
    body = {"__init__": __init__, "__doc__": doc, "__module__": "nagjax", "Scheme": scheme}
    body["__signature__"] = inspect.Signature(plain[1:] + options)
    body["__annotations__"] = {"Scheme": ClassVar[type[Scheme]]}
    return type(scheme.__name__, (Residual,), body)


def _how(scheme: Scheme) -> str:
    old, new = dataclasses.asdict(scheme), dataclasses.asdict(scheme.trained())
    without = ", ".join(f"{name}={value!r}" for name, value in new.items() if value != old[name])
    return f"pass progress=step / steps in training and progress=1.0 afterwards, or turn that off ({without})"


def opened(stream: OpenStream) -> OpenStream:
    if not isinstance(stream, OpenStream):
        raise UserError("stream", type(stream).__name__, "give what `open` or `advance` returned")
    return stream
