"""What every parameter of nagjax has besides its value: the names of its axes, and its role for the optimizer.

Roles: "matrix" (hidden matrices: weight decay, Muon if chosen), "embedding" (tables that are looked up), "head" (the
table of the logits, unless it is the embedding's), "norm" (gains and biases), "gate" (parameters that commit updates:
the scheme's own relative learning rate), "adapter" (LoRA's factors, `nagjax.layers.lora`). Only "matrix" decays unless
`--decay` says otherwise.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx, struct
from flax.linen import LogicallyPartitioned

from nagjax.errors import UserError

ROLES = ("matrix", "embedding", "head", "norm", "gate", "adapter")
STACKED = {nnx.PARTITION_NAME: None}  # for nnx.vmap: the axis along which layers are stacked has no name


def parameter(value: jax.Array, axes: tuple[str | None, ...], role: str) -> nnx.Param:
    """A parameter whose last axes have these names. The names are also in Flax's own metadata: `nnx.get_partition_spec`
    returns them as specs, and inside `flax.linen.logical_axis_rules` with mesh axes in their place."""
    return nnx.Param(value, axes=axes, role=role, out_sharding=axes, eager_sharding=False)


def check_rngs(rngs: Any) -> None:
    """Raises UserError unless `rngs` is an `nnx.Rngs` with a stream for parameters."""
    if not isinstance(rngs, nnx.Rngs):
        raise UserError("rngs", type(rngs).__name__, "give nnx.Rngs(seed)")
    if not hasattr(rngs, "params"):
        raise UserError("rngs", sorted(rngs), "there is no stream for parameters: give nnx.Rngs(seed)")


def shapes_of[T](make: Callable[[], T]) -> T:
    """`nnx.eval_shape`, also under `jax.set_mesh`, where it would look up the names of the axes in that mesh."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return nnx.eval_shape(make)


def label(module: nnx.Module) -> None:
    """Gives parameters without a role the role "gate" and axes without names. These are parameters of Flax's own layers
    in a user's scheme."""
    for _, leaf in nnx.iter_graph(module):
        facts = leaf.get_metadata() if isinstance(leaf, nnx.Param) else {"role": "", "axes": ()}
        if not facts.keys() >= {"role", "axes"}:
            axes = facts.get("out_sharding") or (None,) * leaf.ndim
            leaf.set_metadata(**{"role": "gate", "axes": axes, "out_sharding": axes, "eager_sharding": False} | facts)


@struct.dataclass
class Labelled(LogicallyPartitioned):
    """The box of a Linen parameter: the names of its axes, its role, and its scheme. `nn.unbox` takes the parameter
    out."""

    role: str = struct.field(default="matrix", pytree_node=False)
    scheme: Any = struct.field(default=None, pytree_node=False)
