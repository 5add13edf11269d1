"""The residual schemes as Linen modules: `nagjax.linen.NAG`, `nagjax.linen.Review`, ..., one for each scheme.

    class Mixer(nn.Module):
        @nn.compact
        def __call__(self, x, progress):
            branches = [nn.Dense(512) for _ in range(24)]
            return nagjax.linen.NAG(width=512, sublayers=24)(x, branches, progress=progress)

Each is the nnx module of the same name (`nagjax.NAG`) over Linen's parameters: "gate", "entry" and "ends" in "params",
boxed with their axes' names, which `nn.get_partition_spec` reads and `nn.unbox` takes off. A scheme's options are
handed over as `options`: `NAG(width=512, sublayers=24, options={"directions": 16})`.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import jax
from flax import linen as nn
from flax import nnx
from flax.core import FrozenDict
from jaxtyping import Array, Float, Int

from nagjax.layers.parameters import Scales
from nagjax.parameters import Labelled
from nagjax.residual import Scheme
from nagjax.residual.module import Branch, OpenStream, Residual, Slot, module_named, modules

PARTS = ("gate", "entry", "ends")


class LinenResidual(nn.Module):
    """A residual scheme for `sublayers` branches on rows of `width` features; see `nagjax.residual.module.Residual`."""

    Scheme: ClassVar[type[Scheme]]

    width: int
    sublayers: int
    embedding_std: float | None = None
    options: Mapping[str, Any] = FrozenDict()  # of the scheme

    def setup(self):
        def make(key: jax.Array) -> Residual:
            scheme = self.Scheme(**self.options)
            std = self.embedding_std
            return Residual(scheme, self.width, self.sublayers, rngs=nnx.Rngs(params=key), embedding_std=std)

        abstract = nnx.eval_shape(lambda: make(jax.random.key(0)))
        self.graph, state = nnx.split(abstract)

        def boxed(variable: nnx.Variable, value: jax.Array) -> Labelled:
            facts = variable.get_metadata()
            names = facts["out_sharding"] or (None,) * value.ndim
            return Labelled(value, names=names, role=facts["role"], scheme=abstract.scheme)

        def start(key: jax.Array, part: str) -> dict:
            made = nnx.state(make(key)).get(part, {})
            return jax.tree.map(
                lambda own: boxed(own, own[...]), _plain(made), is_leaf=lambda x: isinstance(x, nnx.Variable)
            )

        found = {part: self.param(part, start, part) for part in PARTS if part in state}
        self.values = found

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
        return self.residual.start_factors(i)


def _plain(state: Any) -> Any:
    """Nested dicts of variables."""
    return {key: _plain(own) for key, own in state.items()} if isinstance(state, Mapping) else state


@functools.cache
def _module_of(name: str) -> type[LinenResidual]:
    nnx_module = module_named(name)
    doc = f"{nnx_module.__doc__}\n\nA Linen module; options of the scheme: `options`."
    return type(name, (LinenResidual,), {"__doc__": doc, "__module__": __name__, "Scheme": nnx_module.Scheme})


def __getattr__(name: str) -> type[LinenResidual]:
    if name.startswith("_") or name not in modules():
        raise AttributeError(f"nagjax.linen has no {name!r}; it has {', '.join(modules())}")
    return _module_of(name)


def __dir__() -> list[str]:
    return sorted({*globals(), *modules()})
