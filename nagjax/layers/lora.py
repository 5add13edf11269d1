"""LoRA: beside every adapted matrix, which is frozen, a trained product of two thin matrices.

    x (W + s A B),    A [in, r], B [r, out],    s = alpha / rank

Hu et al. 2021, arXiv:2106.09685. A starts normal with standard deviation 1 / sqrt(in), B at 0, so that a run begins
with the model that it adapts. Training computes `x W + s (x A) B`, so that no gradient of W's size exists. Two cases
sum W + s A B first, in float32, one block at a time: experts' matrices, and all matrices on a CPU without a mesh (whose
matmuls are fused over several matrices).
"""

import copy
import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from nagjax.errors import UserError
from nagjax.layers.config import LoRAConfig
from nagjax.layers.platform import on_one_cpu
from nagjax.parameters import parameter

GROUPS = {
    "attention": ("query", "key", "value", "out"),
    "mlp": ("gate", "up", "down", "shared_gate", "shared_up", "shared_down"),
}


class Adapter(nnx.Module):
    """The two factors of one matrix [in, out], or of one matrix for each expert."""

    def __init__(self, weight: nnx.Param, rank: int, rngs: nnx.Rngs):
        axes = weight.get_metadata()["axes"]
        *many, inputs, outputs = weight.shape
        start = jax.random.normal(rngs.params(), (*many, inputs, rank)) * inputs**-0.5
        self.a = parameter(start, (*axes[:-1], None), "adapter")
        self.b = parameter(jnp.zeros((*many, rank, outputs)), (*axes[:-2], None, axes[-1]), "adapter")


class Adapters(nnx.Module):
    """The adapters of one branch, by the names of its matrices."""

    def __init__(self, branch: nnx.Module, names: tuple[str, ...], rank: int, rngs: nnx.Rngs):
        for name in names:
            setattr(self, name, Adapter(getattr(branch, name), rank, rngs))


def adapters(kind: str, branch: nnx.Module, config: LoRAConfig, rngs: nnx.Rngs) -> Adapters | None:
    """The adapters of an attention or mlp branch; None if the config asks for none. Raises UserError if the config
    names a matrix that the branch lacks."""
    if not config.rank:
        return None
    there = [name for name in GROUPS[kind] if getattr(branch, name, None) is not None]
    for target in config.targets:
        if target in GROUPS[kind] and target not in there:
            raise UserError("lora.targets", target, f"this model's {kind} has {', '.join(there)}: choose among these")
    names = [name for name in there if {kind, name.removeprefix("shared_")} & {*config.targets}]
    return Adapters(branch, tuple(names), config.rank, rngs) if names else None


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight", "a", "b"], meta_fields=["scale"])
@dataclasses.dataclass(frozen=True)
class LowRank:
    """`W + s A B` as the right factor of a product. It replaces a parameter in `nagjax.layers`."""

    weight: Float[Array, "m n"]
    a: Float[Array, "m r"]
    b: Float[Array, "r n"]
    scale: float

    def __getitem__(self, every: Any) -> "LowRank":
        return self

    @property
    def shape(self) -> tuple[int, ...]:
        return self.weight.shape

    def astype(self, dtype: Any) -> "LowRank":
        return LowRank(*(part.astype(dtype) for part in (self.weight, self.a, self.b)), self.scale)

    def __rmatmul__(self, x: Float[Array, "B T m"]) -> Float[Array, "B T n"]:
        return x @ self.weight + self.scale * ((x @ self.a) @ self.b)


def adapted(branch: Any, own: Adapters | None, config: LoRAConfig) -> Any:
    """A copy of the branch whose matrices include their adapters' products."""
    if own is None:
        return branch
    changed = copy.copy(branch)
    for name in (name for names in GROUPS.values() for name in names if hasattr(own, name)):
        adapter: Adapter = getattr(own, name)
        parts = getattr(branch, name)[...], adapter.a[...], adapter.b[...]
        apart = parts[0].ndim == 2 and not on_one_cpu()
        vars(changed)[name] = LowRank(*parts, config.scale) if apart else summed(*parts, config.scale)
    return changed


def summed(
    weight: Float[Array, "*n i o"], a: Float[Array, "*n i r"], b: Float[Array, "*n r o"], scale: float
) -> Float[Array, "*n i o"]:
    """`W + s A B` as one matrix."""
    return weight + scale * (a @ b)


def merged(params: Any, config: LoRAConfig) -> Any:
    """A model's parameters without adapters: the adapters' products are added to the matrices."""
    if not config.rank:
        return params
    blocks = {}
    for kind, own in params["blocks"].items():
        branch = dict(own["branch"])
        for name, parts in own.get("lora", {}).items():
            branch[name] = summed(branch[name], parts["a"], parts["b"], config.scale)
        blocks[kind] = {name: part for name, part in own.items() if name != "lora"} | {"branch": branch}
    return params | {"blocks": blocks}
