"""What every op of this package shares: choosing an implementation, differentiating it, placing it on a mesh.

An op is a folder. Its `__init__` declares one `Op` and one public function that checks its arguments and
calls `run(OP, implementation, *arrays)`. Beside it lie

    reference.py   forward(*inputs) -> outputs               plain jnp, the oracle, differentiated by JAX
    xla.py, ...    forward(*inputs) -> (outputs, extra)      one file per implementation
                   backward(residuals, cotangents) -> gradients
                   refusal(*inputs) -> str | None            why these shapes or dtypes cannot be taken
                   PLATFORMS                                 where it runs, or None for everywhere

All of these are tuples of arrays. `residuals` = the inputs named by `Op.keep_inputs`, the outputs named by
`Op.keep_outputs`, then `extra`; `gradients` has one entry per differentiable input, in order. `run` flattens
the leading dimensions of row arguments to exactly one before an implementation sees them, so an
implementation only knows `[N, D]`. The gradient of a replicated input is the sum over the rows at hand, in
float32: `run` adds up the shards and casts every gradient to the dtype of its input. `refusal` may look at
trailing dimensions and dtypes, never at the number of rows (a shard has fewer). Compile-time constants of an
op (an epsilon) are keyword arguments of `run`, handed to all of these functions. A new implementation is a
new file and its name in the op's `implementations`; a new op is a new folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any

import jax

# Importing Pallas adds a setting to JAX's trace context. Implementations import it when an op is first traced: by then
# the second call of a jitted function would see another context than the first, and be compiled again.
import jax.experimental.pallas.tpu  # noqa: F401
import jax.numpy as jnp

from pallas_kernels.placement import Placement, current_placement, on_shards, place
from pallas_kernels.refuse import refuse

PLATFORMS = ("cpu", "tpu", "cuda", "rocm")

# implementation=None: the first of these that takes the shapes, per platform.
BEST_FIRST = ("mosaic_tpu", "pallas_triton", "xla")

Implementation = str | Sequence[str] | None


@dataclasses.dataclass(frozen=True, eq=False)
class Op:
    """The shape of an op, as far as the shared machinery needs it.

    Args:
      package: `__name__` of the op's folder; implementations are imported from it when first chosen.
      inputs: per argument the number of trailing (not row) dimensions, or None for a replicated argument.
      outputs: the same per output; every output has rows.
      keep_inputs, keep_outputs: positions of the inputs and outputs the backward pass reads.
      extra: trailing dimensions of each further row array that `forward` saves.
      implementations: names besides `reference`.
      best_first: what implementation=None tries, in order.
      integer_inputs: positions of arguments without a gradient.
    """

    package: str
    inputs: tuple[int | None, ...]
    outputs: tuple[int, ...]
    keep_inputs: tuple[int, ...]
    implementations: tuple[str, ...]
    keep_outputs: tuple[int, ...] = ()
    extra: tuple[int, ...] = ()
    best_first: tuple[str, ...] = BEST_FIRST
    integer_inputs: tuple[int, ...] = ()

    @property
    def residuals(self) -> tuple[int | None, ...]:
        kept = tuple(self.inputs[i] for i in self.keep_inputs)
        return kept + tuple(self.outputs[i] for i in self.keep_outputs) + self.extra

    @property
    def gradients(self) -> tuple[int | None, ...]:
        return tuple(t for i, t in enumerate(self.inputs) if i not in self.integer_inputs)

    @property
    def name(self) -> str:
        return self.package.partition(".")[2]

    def module(self, implementation: str) -> Any:
        return importlib.import_module(f"{self.package}.{implementation}")


@dataclasses.dataclass(frozen=True)
class Choice:
    """Which implementation runs on each platform, and why the others do not."""

    op: Op
    names: tuple[str | None, ...]  # one per entry of PLATFORMS
    reasons: str
    constants: tuple[tuple[str, Any], ...] = ()

    def on(self, platform: str) -> str | None:
        return self.names[PLATFORMS.index(platform)]


def run(
    op: Op, implementation: Implementation, *args: jax.Array, **constants: float | int | bool | str
) -> tuple[jax.Array, ...]:
    """The op on `args`, by the chosen implementation, differentiable, on the current row placement.

    Row arguments may have any number of leading dimensions, all the same ones; outputs have them too.
    `constants` are compile-time values that every function of the implementation takes as keywords.
    """
    if implementation is None:
        implementation = _preferred.get()
    if implementation == "reference":
        shape, rows = _flatten(op.inputs, args)
        return _unflatten(shape, op.outputs, op.module("reference").forward(*rows, **constants))
    choice = choose(op, implementation, *args, **constants)
    dtypes = tuple(jnp.dtype(a.dtype) for a in args)
    placement = current_placement()
    args = place(args, placement, _rows(len(_lead_shape(op.inputs, args)), op.inputs))
    return _differentiable(choice, dtypes, placement, _interpreter.get())(*args)


def choose(op: Op, implementation: Implementation, *args: jax.Array, **constants) -> Choice:
    """The first acceptable implementation on every platform.

    Args:
      implementation: None (the op's own order of preference), one name, or names to try in order.

    Raises:
      ValueError: an unknown name, or no implementation takes the arguments on any platform; the message gives
        the reason of each refusal. Where only some platforms are left without one, lowering for such a
        platform raises the same error.
    """
    if implementation is None:
        implementation = [name for name in op.best_first if name in op.implementations]
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    for name in names:
        if name == "reference":
            raise ValueError(f"{op.name}: implementation 'reference' stands alone, not in a sequence")
        if name not in op.implementations:
            known = ", ".join(("reference", *op.implementations))
            raise ValueError(f"{op.name}: unknown implementation {name!r}; there are {known}")
    rows = _flat_types(op.inputs, args)
    interpreted = _interpreter.get() is not None
    reasons, taken = [], dict.fromkeys(PLATFORMS)
    for name in names:
        module = op.module(name)
        refusal = module.refusal(*rows, **constants)
        if refusal:
            reasons.append(f"{name}: {refusal}")
            continue
        places = PLATFORMS if interpreted or module.PLATFORMS is None else module.PLATFORMS
        if places is not PLATFORMS:
            reasons.append(f"{name}: runs on {', '.join(places)} only")
        for platform in places:
            taken[platform] = taken[platform] or name
    text = f"{op.name}: no implementation left. " + "; ".join(reasons)
    if not any(taken.values()):
        raise ValueError(text)
    return Choice(op, tuple(taken.values()), text, tuple(sorted(constants.items())))


_preferred: ContextVar[Implementation] = ContextVar("preferred_implementation", default=None)


@contextlib.contextmanager
def using(implementation: Implementation) -> Iterator[None]:
    """Ops traced inside that are called with implementation=None take this one: a name, or names in order."""
    token = _preferred.set(implementation)
    try:
        yield
    finally:
        _preferred.reset(token)


_interpreter: ContextVar[Any] = ContextVar("pallas_interpreter", default=None)


@contextlib.contextmanager
def interpreting(params: Any = True) -> Iterator[None]:
    """Run Pallas kernels traced inside by an interpreter, on any platform: True or `InterpretParams`."""
    token = _interpreter.set(params)
    try:
        yield
    finally:
        _interpreter.reset(token)


def interpreter() -> Any:
    """What a kernel passes as `interpret=` to `pl.pallas_call`."""
    params = _interpreter.get()
    return False if params is None else params


@functools.lru_cache(maxsize=1024)
def _differentiable(choice: Choice, dtypes: tuple, placement: Placement | None, interpret: Any) -> Callable:
    """The custom_vjp function for one choice. Choice and placement are settled when the forward pass is
    traced; the backward pass, traced later and elsewhere, uses the same ones. Forward and backward each have
    their own `shard_map`, so no collective comes from transposing one."""
    op, constants = choice.op, dict(choice.constants)
    real_dtypes = tuple(d for i, d in enumerate(dtypes) if i not in op.integer_inputs)

    # Jitted, so that a kernel is traced once for its shapes and not in every sublayer, program and derivative.
    @functools.partial(jax.jit, inline=True)
    def forward_rows(*rows):
        return _switch(choice, "forward", lambda m, *a: m.forward(*a, **constants), *rows)

    @functools.partial(jax.jit, inline=True)
    def backward_rows(*rows):
        return _switch(choice, "backward", local_gradients, *rows)

    def local_gradients(module, *arrays):
        n = len(op.residuals)
        sums = module.backward(arrays[:n], arrays[n:], **constants)
        return tuple(
            x.astype(jnp.float32 if t is None else dtype)
            for x, t, dtype in zip(sums, op.gradients, real_dtypes, strict=True)
        )

    def forward(*args):
        def shard(*local):
            shape, rows = _flatten(op.inputs, local)
            outputs, extra = forward_rows(*rows)
            return _unflatten(shape, op.outputs + op.extra, outputs + extra)

        lead = len(_lead_shape(op.inputs, args))
        with interpreting(interpret):
            results = on_shards(shard, placement, _rows(lead, op.inputs), _rows(lead, op.outputs + op.extra))(*args)
        outputs, extra = results[: len(op.outputs)], results[len(op.outputs) :]
        kept = tuple(args[i] for i in op.keep_inputs) + tuple(outputs[i] for i in op.keep_outputs)
        return outputs, kept + extra

    def backward(residuals, cotangents):
        given = op.residuals + op.outputs

        def shard(*local):
            shape, rows = _flatten(given, local)
            return _unflatten(shape, op.gradients, backward_rows(*rows))

        arrays = (*residuals, *cotangents)
        lead = len(_lead_shape(given, arrays))
        with interpreting(interpret):
            sums = iter(on_shards(shard, placement, _rows(lead, given), _rows(lead, op.gradients))(*arrays))
        return tuple(None if i in op.integer_inputs else next(sums).astype(dtype) for i, dtype in enumerate(dtypes))

    @jax.custom_vjp
    def call(*args):
        return forward(*args)[0]

    call.defvjp(forward, backward)
    return call


def _switch(choice: Choice, verb: str, apply: Callable, *args: jax.Array) -> tuple[jax.Array, ...]:
    """`apply(module, *args)` with the module chosen for the platform that the program is lowered for."""
    branches = {
        name: functools.partial(apply, choice.op.module(name)) for name in set(choice.names) if name is not None
    }
    if len(branches) == 1 and None not in choice.names:
        return next(iter(branches.values()))(*args)
    anyone = next(iter(branches.values()))

    def nobody(*a):
        return refuse(f"{choice.reasons} ({verb} pass)", anyone, *a)

    per_platform = {p: branches.get(name, nobody) for p, name in zip(PLATFORMS, choice.names, strict=True)}
    return jax.lax.platform_dependent(*args, default=per_platform.pop("cpu"), **per_platform)


def _lead_shape(trailing: Sequence[int | None], args: Sequence[jax.Array]) -> tuple[int, ...]:
    return next(a.shape[: a.ndim - t] for a, t in zip(args, trailing, strict=True) if t is not None)


def _rows(lead: int, trailing: Sequence[int | None]) -> tuple[int | None, ...]:
    return tuple(None if t is None else lead for t in trailing)


def _flatten(
    trailing: Sequence[int | None], args: Sequence[jax.Array]
) -> tuple[tuple[int, ...], tuple[jax.Array, ...]]:
    """The leading shape of the row arguments, and all arguments with it made one dimension."""
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
