"""The residual schemes as Linen modules: `nagjax.linen.NAG`, `nagjax.linen.Review`, ..., one for each scheme.

    class Mixer(nn.Module):
        @nn.compact
        def __call__(self, x, progress):
            branches = [nn.Dense(512) for _ in range(24)]
            return nagjax.linen.NAG(width=512, sublayers=24)(x, branches, progress=progress)

Each is the nnx module of the same name (`nagjax.NAG`) over Linen's parameters: "gate", "entry" and "ends" in "params",
boxed with their axes' names, which `nn.get_partition_spec` reads and `nn.unbox` takes off. A scheme's options are
handed over as `options`: `NAG(width=512, sublayers=24, options={"directions": 16})`.
`MixtureOfDepths` routes one of them.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict
from jaxtyping import Array, Float, Int, UInt32

from nagjax.layers.parameters import Scales
from nagjax.layers.where import Where
from nagjax.mod import module as mod
from nagjax.parameters import Labelled
from nagjax.residual import Scheme
from nagjax.residual.module import Branch, OpenStream, Residual, Slot, module_of, modules, start_factors

PARTS = ("gate", "entry", "ends")


class LinenResidual(nn.Module):
    """A residual scheme for `sublayers` branches on rows of `width` features; see `nagjax.residual.module.Residual`."""

    Scheme: ClassVar[type[Scheme]]

    width: int
    sublayers: int
    embedding_std: float | None = None
    options: Mapping[str, Any] = FrozenDict()  # of the scheme

    def setup(self):
        self.graph, self.values = _parameters(self, functools.partial(_made, self), PARTS)

    @property
    def residual(self) -> Residual:
        """The nnx module over this module's parameters."""
        return nnx.merge(self.graph, nn.unbox(dict(self.values)))

    def __call__(
        self,
        x: Float[Array, "*lead D"],
        branches: Sequence[Branch] | nnx.Module,
        *,
        progress: float | Float[Array, ""] | None = None,
        observe: bool = False,
        remat: bool = False,
    ) -> Any:
        return self.residual(x, branches, progress=progress, observe=observe, remat=remat)

    def open(self, x: Float[Array, "*lead D"], progress: float | Float[Array, ""] | None = None) -> OpenStream:
        return self.residual.open(x, progress)

    def read(self, stream: OpenStream, i: int | Int[Array, ""] = 1) -> Float[Array, "*lead D"]:
        return self.residual.read(stream, i)

    def advance(
        self, stream: OpenStream, update: Float[Array, "*lead D"], i: int | Int[Array, ""] | Slot
    ) -> OpenStream:
        return self.residual.advance(stream, update, i)

    def observe(
        self, stream: OpenStream, update: Float[Array, "*lead D"], i: int | Int[Array, ""] | Slot
    ) -> tuple[OpenStream, dict[str, Float[Array, ""]]]:
        return self.residual.observe(stream, update, i)

    def close(self, stream: OpenStream) -> Float[Array, "*lead D"]:
        return self.residual.close(stream)

    def logits(self, stream: OpenStream, table: Float[Array, "V D"]) -> Float[Array, "*lead V"]:
        return self.residual.logits(stream, table)

    def slots(self) -> Slot:
        return self.residual.slots()

    def start_factors(self, i: int | Int[Array, ""]) -> Scales:
        return start_factors(self.Scheme(**self.options), i, self.sublayers)


class MixtureOfDepths(nn.Module):
    """`nagjax.MixtureOfDepths` around a Linen residual, which keeps its own parameters; those of a router or a decider
    are "routing" in "params". Rows are [B, T, D]; arguments and errors are those of the nnx module.
    """

    residual: LinenResidual
    rate: float = 0.25
    router: str = "auto"
    decider: str = "threshold"

    def setup(self):
        def made(key: jax.Array) -> mod.MixtureOfDepths:
            inner, rngs = _made(self.residual, key), nnx.Rngs(params=key)
            return mod.MixtureOfDepths(inner, self.rate, rngs=rngs, router=self.router, decider=self.decider)

        self.graph, self.values = _parameters(self, made, ("routing",))

    @property
    def routed(self) -> mod.MixtureOfDepths:
        """The nnx module over this module's parameters."""
        inner = dict(self.residual.values)
        return nnx.merge(self.graph, nn.unbox(dict(self.values) | ({"residual": inner} if inner else {})))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        branches: Sequence[Branch],
        *,
        where: Where | None = None,
        progress: float | Float[Array, ""] | None = None,
        cuts: Float[Array, " S"] | None = None,
        causal: bool = False,
        noise: int | UInt32[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], mod.Routed]:
        return self.routed(x, branches, where=where, progress=progress, cuts=cuts, causal=causal, noise=noise)


def _made(linen: LinenResidual, key: jax.Array) -> Residual:
    """The nnx module with start values of its own; from the fields alone, which need no bound module."""
    make, std = module_of(linen.Scheme), linen.embedding_std
    return make(linen.width, linen.sublayers, rngs=nnx.Rngs(params=key), embedding_std=std, **linen.options)


def _parameters(
    module: nn.Module, make: Callable[[jax.Array], nnx.Module], parts: Sequence[str]
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """The structure of the nnx module, and its values at `parts` as parameters of the Linen module, in boxes."""
    abstract = nnx.eval_shape(lambda: make(jax.random.key(0)))
    graph, state = nnx.split(abstract)
    scheme = getattr(abstract, "residual", abstract).scheme

    def boxed(variable: nnx.Variable) -> Labelled:
        facts, value = variable.get_metadata(), variable[...]
        return Labelled(value, names=facts["out_sharding"] or (None,) * value.ndim, role=facts["role"], scheme=scheme)

    def start(key: jax.Array, part: str) -> dict:
        own = _plain(nnx.state(make(key))[part])
        return jax.tree.map(boxed, own, is_leaf=lambda x: isinstance(x, nnx.Variable))

    return graph, {part: module.param(part, start, part) for part in parts if part in state}


def _plain(state: Any) -> Any:
    """Nested dicts of variables."""
    return {key: _plain(own) for key, own in state.items()} if isinstance(state, Mapping) else state


@functools.cache
def _module_of(scheme: type[Scheme]) -> type[LinenResidual]:
    doc = f"{module_of(scheme).__doc__}\n\nA Linen module; options of the scheme: `options`."
    return type(scheme.__name__, (LinenResidual,), {"__doc__": doc, "__module__": __name__, "Scheme": scheme})


def __getattr__(name: str) -> type[LinenResidual]:
    known = {} if name.startswith("_") else modules()
    if name not in known:
        raise AttributeError(f"nagjax.linen has no {name!r}; it has {', '.join(modules())}")
    return _module_of(known[name].Scheme)


def __dir__() -> list[str]:
    return sorted({*globals(), *modules()})
