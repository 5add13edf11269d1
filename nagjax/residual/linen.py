"""Residual schemes as Linen modules: each one runs the nnx module of the same name on Linen's parameters."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar

import jax
from flax import linen as nn
from flax import nnx, struct
from flax.core import FrozenDict
from flax.traverse_util import unflatten_dict
from jaxtyping import Array, Float, Int

from nagjax.errors import UserError
from nagjax.layers.parameters import Scales
from nagjax.parameters import Labelled, shapes_of
from nagjax.residual import Scheme
from nagjax.residual.module import Branch, OpenStream, Residual, Slot, module_of, start_factors


@struct.dataclass
class Box(Labelled):
    """The metadata box around each parameter. Two things work without settings that Flax's own boxes require and
    otherwise raise for: an axis that `nn.vmap` or `nn.scan` adds gets no name unless `metadata_params` gives one, and
    `nnx.bridge` needs no mesh. So users need not know about boxes."""

    def add_axis(self, index: int, params: dict) -> nn.Partitioned:
        return super().add_axis(index, {nn.PARTITION_NAME: None} | params)

    def remove_axis(self, index: int, params: dict) -> nn.Partitioned:
        return super().remove_axis(index, {nn.PARTITION_NAME: None} | params)

    def to_nnx_metadata(self) -> dict[str, Any]:
        facts = dict(vars(self))
        facts |= {"out_sharding": facts.pop("names"), "sharding_rules": facts.pop("rules"), "eager_sharding": False}
        return facts


def check_bound(own: nn.Module) -> None:
    """Raises UserError for a module outside of init and apply, which has no parameters there."""
    if own.scope is None:
        raise UserError("module", type(own).__name__, "is not bound: call it in init or apply, as Linen's modules")


class LinenResidual(nn.Module):
    """A residual scheme for `sublayers` branches on rows of `width` features. Methods, shapes and errors are those of
    `nagjax.residual.module.Residual`. `options`: the scheme's options by name."""

    Scheme: ClassVar[type[Scheme]]

    width: int
    sublayers: int
    embedding_std: float | None = None
    options: Mapping[str, Any] = FrozenDict()

    def setup(self):
        self.graph, self.values = parameters(self, functools.partial(nnx_residual, self), ("gate", "entry", "ends"))

    @property
    def residual(self) -> Residual:
        """The nnx module that uses this module's parameters. Raises UserError outside of init and apply."""
        check_bound(self)
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

    def slot(self, i: int | Int[Array, ""]) -> Slot:
        return self.residual.slot(i)

    def slots(self) -> Slot:
        return self.residual.slots()

    def start_factors(self, i: int | Int[Array, ""]) -> Scales:
        return start_factors(self.Scheme(**self.options), i, self.sublayers)


def nnx_residual(linen: LinenResidual, key: jax.Array) -> Residual:
    """A new nnx module with its own initial values. It needs only the fields of `linen`, which may be unbound."""
    make: Any = module_of(linen.Scheme)
    std, rngs = linen.embedding_std, nnx.Rngs(params=key)
    return make(linen.width, linen.sublayers, rngs=rngs, embedding_std=std, **linen.options)


def parameters(
    module: nn.Module, make: Callable[[jax.Array], nnx.Module], parts: Sequence[str]
) -> tuple[nnx.GraphDef, dict[str, Any]]:
    """Makes the nnx module's values at the paths `parts` boxed parameters of the Linen module. Returns the nnx module's
    structure and these parameters."""
    abstract: Any = shapes_of(lambda: make(jax.random.key(0)))
    graph, state = nnx.split(abstract)
    scheme = getattr(abstract, "residual", abstract).scheme

    def boxed(variable: nnx.Variable) -> Box:
        facts, value = variable.get_metadata(), variable[...]
        return Box(value, names=facts["out_sharding"] or (None,) * value.ndim, role=facts["role"], scheme=scheme)

    def start(key: jax.Array, part: str) -> dict:
        own = nnx.to_flat_state(nnx.state(make(key))[part])
        return unflatten_dict({path: boxed(variable) for path, variable in own})

    return graph, {part: module.param(part, start, part) for part in parts if part in state}
