"""What every parameter of nagjax carries besides its value: names of its axes, and its role for the optimizer.

Roles: "matrix" (hidden matrices: weight decay, Muon if chosen), "embedding" (tables that are looked up), "head" (the
table of the logits, unless it is the embedding's), "norm" (gains and biases), "gate" (what commits updates: a scheme's
own relative learning rate), "adapter" (LoRA's factors, `nagjax.layers.lora`). Only "matrix" decays unless `--decay`
says otherwise.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx, struct
from flax.linen import LogicallyPartitioned

from nagjax.errors import UserError

ROLES = ("matrix", "embedding", "head", "norm", "gate", "adapter")
STACKED = {nnx.PARTITION_NAME: None}  # for nnx.vmap: the axis that layers are stacked along has no name


def parameter(value: jax.Array, axes: tuple[str | None, ...], role: str) -> nnx.Param:
    """A parameter whose last axes have these names. They stand in Flax's own metadata too: `nnx.get_partition_spec`
    gives its specs, with mesh axes in place of names inside `flax.linen.logical_axis_rules`."""
    return nnx.Param(value, axes=axes, role=role, out_sharding=axes, eager_sharding=False)


def check_rngs(rngs: Any) -> None:
    """Raises UserError for what are no random streams of Flax, or have none for parameters."""
    if not isinstance(rngs, nnx.Rngs):
        raise UserError("rngs", type(rngs).__name__, "give nnx.Rngs(seed)")
    if not hasattr(rngs, "params"):
        raise UserError("rngs", sorted(rngs), "there is no stream for parameters: give nnx.Rngs(seed)")


def shapes_of[T](make: Callable[[], T]) -> T:
    """`nnx.eval_shape`, which under `jax.set_mesh` would look for the names of the axes in that mesh."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return nnx.eval_shape(make)


def label(module: nnx.Module) -> None:
    """Makes gates, on axes without names, of the parameters that do not say what they are: those of Flax's layers in a
    scheme of somebody's own."""
    for _, leaf in nnx.iter_graph(module):
        facts = leaf.get_metadata() if isinstance(leaf, nnx.Param) else {"role": "", "axes": ()}
        if not facts.keys() >= {"role", "axes"}:
            axes = facts.get("out_sharding") or (None,) * leaf.ndim
            leaf.set_metadata(**{"role": "gate", "axes": axes, "out_sharding": axes, "eager_sharding": False} | facts)


@struct.dataclass
class Labelled(LogicallyPartitioned):
    """A Linen parameter in its box: names of its axes, its role, and the scheme it is of. `nn.unbox` takes it out."""

    role: str = struct.field(default="matrix", pytree_node=False)
    scheme: Any = struct.field(default=None, pytree_node=False)
