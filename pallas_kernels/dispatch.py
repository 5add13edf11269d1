"""What all ops share: choosing an implementation, differentiating it, placing it on a mesh.

An op is a file in `ops/` with one public function, which checks its arguments and calls `run(OP, implementation,
*arrays)`, and one `Op`, which holds

    reference(*inputs) -> outputs                      plain jnp, the oracle, differentiated by JAX
    implementations: for each name an `Implementation`
        forward(*inputs) -> (outputs, extra)
        backward(residuals, cotangents) -> gradients
        refusal(*inputs) -> str | None                 why these shapes or dtypes are not supported
        platforms                                      where it runs, or None for everywhere
        unavailable(platform) -> str | None            why it cannot run there at all, whatever the shapes

All of these are tuples of arrays. `residuals` = the inputs named by `Op.keep_inputs`, the outputs named by
`Op.keep_outputs`, then `extra`; `gradients` has one entry per differentiable input, in order. `run` flattens the
leading dimensions of row arguments to exactly one, so an implementation only sees `[N, D]` (of rows by index
`[G, N, D]` and `[G, k]`). An implementation returns
the gradient of a replicated input as the float32 sum over its own rows; `run` sums over shards and casts every gradient
to the dtype of its input. `refusal` may depend on trailing dimensions and dtypes, never on the number of rows (a shard
has fewer). Compile-time constants of an op (an epsilon) are keyword arguments of `run`, passed to all these functions
but `unavailable`.

No refusal is silent: every choice is logged once, as a warning if a kernel of the current platform is passed over, and
`choices` lists the choices for any shape.
"""

import contextlib
import dataclasses
import functools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax

# Importing Pallas adds a setting to JAX's trace context. If it were first imported while an op is traced, the second
# call of a jitted function would have a different context from the first, and would be compiled again.
import jax.experimental.pallas.tpu  # noqa: F401
import jax.numpy as jnp
from jax.extend.core import Primitive
from jax.interpreters import mlir

from pallas_kernels.derivatives import once
from pallas_kernels.launch import WIDE_ON_AMD, interpreter, interpreting, traced_platform, tracing_for
from pallas_kernels.placement import Placement, alike, check_divides, on_shards, place, placement_of

PLATFORMS = ("cpu", "tpu", "cuda", "rocm")

# implementation=None: per platform, the first of these that supports the shapes.
BEST_FIRST = ("mosaic_tpu", "pallas_triton", "composed", "mosaic_gpu", "xla")
NAMES = (*BEST_FIRST, "triton")  # every name that an op may have
REFERENCE = "reference"  # the name of `Op.reference`, which runs everywhere

ImplementationName = str | Sequence[str] | None

logger = logging.getLogger("pallas_kernels")


def _accept(*args, **constants) -> None:
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class Implementation:
    """One way to compute an op; see the head of this file. `bytes_moved(rows, width, dtype, backward=)` gives the bytes
    that a pass must read and write, if known. `reserve(*inputs)` gives the reason why this implementation is used for
    these inputs only if it is named. `keeps`: trailing dimensions of further row arrays, which `forward` returns after
    the op's `extra` and `backward` gets as its last residuals, if no other implementation can run."""

    forward: Callable[..., tuple]
    backward: Callable[..., tuple]
    platforms: tuple[str, ...] | None = None
    refusal: Callable[..., str | None] = _accept
    unavailable: Callable[[str], str | None] = _accept
    bytes_moved: Callable[..., int] | None = None
    reserve: Callable[..., str | None] = _accept
    keeps: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """An op as the shared code needs it.

    Args:
      inputs: per argument the number of trailing (not row) dimensions, or None for a replicated argument.
      outputs: the same per output; every output has rows.
      keep_inputs, keep_outputs: positions of the inputs and outputs that the backward pass reads.
      extra: trailing dimensions of each further row array that `forward` saves.
      integer_inputs: positions of arguments without a gradient.
    """

    name: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    keep_inputs: tuple[int, ...]
    reference: Callable[..., tuple]
    implementations: Mapping[str, Implementation]
    keep_outputs: tuple[int, ...] = ()
    extra: tuple[int, ...] = ()
    integer_inputs: tuple[int, ...] = ()

    @property
    def kept(self) -> tuple[int | None, ...]:
        kept = tuple(self.inputs[i] for i in self.keep_inputs)
        return kept + tuple(self.outputs[i] for i in self.keep_outputs)

    @property
    def gradients(self) -> tuple[int | None, ...]:
        return tuple(t for i, t in enumerate(self.inputs) if i not in self.integer_inputs)


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which implementation runs on each platform, and why the others do not."""

    op: Op
    names: tuple[str | None, ...]  # one per entry of PLATFORMS
    refusals: tuple[tuple[str, str], ...] = ()  # (implementation, why)
    passed_over: tuple[str, ...] = ()  # platforms with a kernel that was refused in favour of a later implementation
    constants: tuple[tuple[str, Any], ...] = ()

    def on(self, platform: str) -> str | None:
        return self.names[PLATFORMS.index(platform)]

    def only(self, platform: str | None) -> "Choice":
        """The choice for programs of this platform alone. Unchanged if the platform is unknown, if nothing can run on
        it, and on an AMD GPU, for which kernels are traced differently."""
        name = None if platform in (None, "rocm") else self.on(platform)
        return dataclasses.replace(self, names=(name,) * len(PLATFORMS)) if name else self

    @property
    def extra(self) -> tuple[int, ...]:
        """Trailing dimensions of the further row arrays that forward passes save."""
        one = self.names[0] if len(set(self.names)) == 1 else None
        return self.op.extra + (self.op.implementations[one].keeps if one else ())

    @property
    def reasons(self) -> str:
        return "; ".join(f"{name}: {why}" for name, why in self.refusals)


def run(
    op: Op, implementation: ImplementationName, *args: jax.Array, **constants: float | int | bool | str
) -> tuple[jax.Array, ...]:
    """Runs the op on `args` with the chosen implementation, differentiably, on the current row placement.

    Row arguments may have any leading dimensions, the same for all; outputs have them too. `constants` are compile-time
    values that every function of the implementation takes as keywords.
    """
    if implementation is None:
        implementation = _preferred.get()
    args = alike([jnp.asarray(x) for x in args])
    choice = choose(op, implementation, *args, **constants)
    if implementation == REFERENCE or not all(x.size for x in args):  # a kernel cannot be launched on no rows
        shape, rows = _flatten(op.inputs, args)
        return _unflatten(shape, op.outputs, op.reference(*rows, **constants))
    _log(choice)
    choice = choice.only(traced_platform())
    dtypes = tuple(jnp.dtype(a.dtype) for a in args)
    rows = _rows(len(lead := _lead_shape(op.inputs, args)), op.inputs)
    placement = placement_of(args, rows)
    check_divides(op.name, lead, placement)
    args = place(args, placement, rows)
    return _differentiable(choice, dtypes, placement, interpreter())(*args)


def choose(op: Op, implementation: ImplementationName, *args: jax.Array, **constants) -> Choice:
    """The first acceptable implementation on every platform.

    Args:
      implementation: None (the order of BEST_FIRST), one name, or names to try in order, except those of other ops.

    Raises:
      ValueError: an unknown name, or no implementation supports the arguments on any platform; the message gives the
        reason of each refusal. If only some platforms have no implementation, lowering for those raises the error.
    """
    if implementation == REFERENCE:
        return Choice(op, (REFERENCE,) * len(PLATFORMS))
    named = implementation is not None
    names = implementation if named else BEST_FIRST
    one = isinstance(names, str) or not isinstance(names, Sequence)
    names = (names,) if one else tuple(n for n in names if n in op.implementations or n not in NAMES)
    known = ", ".join((REFERENCE, *op.implementations))
    if not names:
        raise ValueError(f"{op.name}: implementation = {implementation!r}; give at least one of {known}, or None")
    for name in names:
        if name == REFERENCE:
            raise ValueError(f"{op.name}: implementation 'reference' must be given alone, not in a sequence")
        if name not in op.implementations:
            raise ValueError(f"{op.name}: unknown implementation {name!r}; there are {known}")
    rows = _flat_types(op.inputs, args)
    taken: dict[str, str | None] = dict.fromkeys(PLATFORMS)
    refusals, passed_over = {}, []
    for name in names:
        way = op.implementations[name]
        home = way.platforms or PLATFORMS
        if why := way.refusal(*rows, **constants) or (None if named else way.reserve(*rows, **constants)):
            refusals[name, why] = None
            passed_over += [p for p in home if taken[p] is None]
            continue
        places = PLATFORMS if interpreter() else home
        if places is not PLATFORMS:
            refusals[name, f"runs on {', '.join(places)} only"] = None
        for platform in [p for p in places if taken[p] is None]:
            if why := way.unavailable(platform):
                refusals[name, why] = None
                passed_over.append(platform)
            else:
                taken[platform] = name
    passed_over = tuple(dict.fromkeys(passed_over))
    choice = Choice(op, tuple(taken.values()), tuple(refusals), passed_over, tuple(sorted(constants.items())))
    if not any(choice.names):
        raise ValueError(_nobody_left(choice))
    return choice


def _nobody_left(choice: Choice) -> str:
    return f"{choice.op.name}: no implementation left. {choice.reasons}"


def here() -> str:
    """The platform of the devices that JAX uses by default."""
    backend = jax.default_backend()
    if backend == "gpu":
        return "rocm" if "rocm" in jax.devices()[0].client.platform_version.lower() else "cuda"
    return backend


_said: set[tuple] = set()


def _log(choice: Choice) -> None:
    if (said := (choice.op.name, choice.names, choice.refusals)) in _said:
        return
    _said.add(said)
    chosen = ", ".join(f"{name} on {p}" for p, name in zip(PLATFORMS, choice.names, strict=True) if name)
    level = logging.WARNING if here() in choice.passed_over else logging.INFO
    logger.log(level, "%s: %s. %s", choice.op.name, chosen, choice.reasons)


_preferred: ContextVar[ImplementationName] = ContextVar("preferred_implementation", default=None)


def preferred() -> ImplementationName:
    """The implementation that the surrounding `using` names; None outside of it."""
    return _preferred.get()


@contextlib.contextmanager
def using(implementation: ImplementationName) -> Iterator[None]:
    """Sets the implementation of ops traced inside with implementation=None: a name, or names to try in order."""
    token = _preferred.set(implementation)
    try:
        yield
    finally:
        _preferred.reset(token)


@functools.lru_cache(maxsize=1024)
def _differentiable(choice: Choice, dtypes: tuple, placement: Placement | None, interpret: Any) -> Callable:
    """The custom_vjp function for one choice. Choice and placement are fixed when the forward pass is traced; the
    backward pass, traced later, uses the same ones. Forward and backward each have their own `shard_map`, so that no
    `shard_map` is transposed, which would add collectives."""
    op, constants, extras = choice.op, dict(choice.constants), choice.extra
    kept_types = op.kept + extras
    real_dtypes = tuple(d for i, d in enumerate(dtypes) if i not in op.integer_inputs)

    # Jitted, so that a kernel is traced once per shape and not in every sublayer, program and derivative.
    @functools.partial(jax.jit, inline=True)
    def forward_rows(*rows):
        return _switch(choice, "forward", local_outputs, *rows)

    @functools.partial(jax.jit, inline=True)
    def backward_rows(*rows):
        return _switch(choice, "backward", local_gradients, *rows)

    def local_outputs(way, *rows):
        outputs, extra = way.forward(*rows, **constants)
        return alike(outputs, rows), alike(extra[: len(extras)], rows)

    def local_gradients(way, *arrays):
        n = len(kept_types)
        sums = alike(way.backward(arrays[:n], arrays[n:], **constants), arrays)
        return tuple(
            x.astype(jnp.promote_types(dtype, jnp.float32) if t is None else dtype)
            for x, t, dtype in zip(sums, op.gradients, real_dtypes, strict=True)
        )

    def forward(*args):
        def shard(*local):
            shape, rows = _flatten(op.inputs, local)
            outputs, extra = forward_rows(*rows)
            return _unflatten(shape, op.outputs + extras, outputs + extra)

        lead = len(_lead_shape(op.inputs, args))
        with interpreting(interpret):
            results = on_shards(shard, placement, _rows(lead, op.inputs), _rows(lead, op.outputs + extras))(*args)
        outputs, extra = results[: len(op.outputs)], results[len(op.outputs) :]
        kept = tuple(args[i] for i in op.keep_inputs) + tuple(outputs[i] for i in op.keep_outputs)
        return outputs, kept + extra

    def backward(residuals, cotangents):
        given = kept_types + op.outputs

        def shard(*local):
            shape, rows = _flatten(given, local)
            return _unflatten(shape, op.gradients, backward_rows(*rows))

        lead = len(_lead_shape(given, arrays := (*residuals, *cotangents)))
        with interpreting(interpret):
            sums = iter(on_shards(shard, placement, _rows(lead, given), _rows(lead, op.gradients))(*arrays))
        return tuple(None if i in op.integer_inputs else next(sums).astype(dtype) for i, dtype in enumerate(dtypes))

    @jax.custom_vjp
    def call(*args):
        return forward(*args)[0]

    call.defvjp(forward, backward)
    return call


def _switch(choice: Choice, verb: str, apply: Callable, *args: jax.Array) -> tuple[jax.Array, ...]:
    """`apply(implementation, *args)` with the implementation for the platform that the program is lowered for."""
    ways = choice.op.implementations

    @functools.cache  # platforms share a branch, except AMD with wide rows
    def branch(name: str | None, amd: bool) -> Callable:
        def traced(*args):
            args = args if name == "xla" else once(choice.op.name, args)
            with tracing_for("rocm") if amd else contextlib.nullcontext():
                return apply(ways[name], *args)

        return traced if name else functools.partial(refuse, f"{_nobody_left(choice)} ({verb} pass)", anyone)

    anyone = branch(next(filter(None, choice.names)), False)
    if len(set(choice.names)) == 1:
        return anyone(*args)
    wide = any(x.ndim > 1 and x.shape[-1] > WIDE_ON_AMD for x in args)
    branches = {p: branch(name, wide and p == "rocm") for p, name in zip(PLATFORMS, choice.names, strict=True)}
    return jax.lax.platform_dependent(*args, default=branches.pop("cpu"), **branches)


# A primitive that cannot be lowered, with the right output types, for platforms without an implementation: the platform
# is known only when a program is lowered, long after `implementation=` was read.
_refuse_p = Primitive("refuse_platform")
_refuse_p.multiple_results = True


def refuse(message: str, like: Callable, *args: jax.Array) -> tuple[jax.Array, ...]:
    """Arrays with the types of `like(*args)`; lowering the program that contains them raises ValueError(message)."""
    leaves, tree = jax.tree.flatten(jax.eval_shape(like, *args))
    outs = _refuse_p.bind(message=message, types=tuple((s.shape, s.dtype) for s in leaves))
    return jax.tree.unflatten(tree, alike(outs, args))


def _raise(message: str):
    raise ValueError(message)


_refuse_p.def_abstract_eval(lambda *, message, types: [jax.core.ShapedArray(s, d) for s, d in types])
_refuse_p.def_impl(lambda *, message, types: _raise(message))
mlir.register_lowering(_refuse_p, lambda ctx, *, message, types: _raise(message))


def _lead_shape(trailing: Sequence[int | None], args: Sequence[jax.Array]) -> tuple[int, ...]:
    return next(a.shape[: a.ndim - t] for a, t in zip(args, trailing, strict=True) if t is not None)


def _rows(lead: int, trailing: Sequence[int | None]) -> tuple[int | None, ...]:
    return tuple(None if t is None else lead for t in trailing)


def _flatten(
    trailing: Sequence[int | None], args: Sequence[jax.Array]
) -> tuple[tuple[int, ...], tuple[jax.Array, ...]]:
    """The leading shape of the row arguments, and all arguments with it flattened to one dimension."""
    shape = _lead_shape(trailing, args)
    n = math.prod(shape)
    return shape, tuple(
        a if t is None or len(shape) == 1 else a.reshape(n, *a.shape[a.ndim - t :])
        for a, t in zip(args, trailing, strict=True)
    )


def _flat_types(trailing: Sequence[int | None], args: Sequence[jax.Array]) -> tuple[jax.ShapeDtypeStruct, ...]:
    n = math.prod(_lead_shape(trailing, args))
    return tuple(
        jax.ShapeDtypeStruct(a.shape if t is None else (n, *a.shape[a.ndim - t :]), a.dtype)
        for a, t in zip(args, trailing, strict=True)
    )


def _unflatten(shape: tuple[int, ...], trailing: Sequence[int | None], outs: Sequence[jax.Array]) -> tuple:
    return tuple(
        o if t is None or len(shape) == 1 else o.reshape(*shape, *o.shape[1:])
        for o, t in zip(outs, trailing, strict=True)
    )
