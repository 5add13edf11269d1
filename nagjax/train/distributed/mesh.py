"""The device mesh, and the one table that maps logical axes to mesh axes."""

import dataclasses
import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nagjax.errors import UserError
from nagjax.model.config import ModelConfig
from nagjax.runs.config import MeshConfig

SHARDING_RULES = {
    "batch": ("data", "fsdp"),  # sequences of activations
    "tokens": "sequence",  # tokens of each sequence
    "embed": "fsdp",
    "embed_out": "tensor",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}

BATCH = SHARDING_RULES["batch"]
AXES = tuple(field.name for field in dataclasses.fields(MeshConfig))


def make_mesh(config: MeshConfig, devices=None) -> Mesh:
    """A mesh with Auto axes data, fsdp, tensor, sequence over `devices` (default: all)."""
    devices = list(jax.devices() if devices is None else devices)
    model = config.fsdp * config.tensor * config.sequence
    data = config.data or max(len(devices) // model, 1)
    shape = (data, config.fsdp, config.tensor, config.sequence)
    if data * model > len(devices) or (config.data is None and data * model != len(devices)):
        fix = f"the product {' x '.join(AXES)} must be {len(devices)}, the number of devices: change --mesh.data"
        raise UserError("mesh", shape, fix)
    return Mesh(np.array(devices[: data * model]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def check_batch(batch: int, accumulate: int, mesh: Mesh) -> None:
    shards = math.prod(mesh.shape[axis] for axis in BATCH)
    if batch // accumulate % shards:
        fitting = max(batch // accumulate // shards, 1) * shards * accumulate
        raise UserError(
            "batch", batch, f"batch / accumulate must be divisible by data x fsdp = {shards}; try {fitting}"
        )


def check_sequence(model: ModelConfig, shape: Mapping[str, int]) -> None:
    """Raises UserError if the tokens of a sequence cannot be split over the mesh's `sequence` axis."""
    parts = shape["sequence"]
    if parts == 1:
        return
    if model.context % parts:
        fitting = max(model.context // parts, 1) * parts
        raise UserError("context", model.context, f"must be divisible by mesh.sequence = {parts}; try {fitting}")
    if model.mod.active:
        fix = "Mixture-of-Depths chooses among all tokens of a sequence: use mesh.sequence 1 and more fsdp or tensor"
        raise UserError("mesh.sequence", parts, fix)
    if model.attention == "cudnn":
        raise UserError("attention", "cudnn", f"needs whole sequences, not mesh.sequence = {parts}: choose auto or xla")


def batch_share(mesh: Mesh) -> dict[str, int]:
    """The part of a batch that this process loads, and the number of parts: `process_index` and `process_count`.

    Hosts that hold the same sequences (because a tensor or sequence axis crosses hosts) load the same part. Raises
    UserError if the hosts' parts differ in size, or if a host has no device in the mesh.
    """
    rows = mesh.devices.reshape(math.prod(mesh.shape[axis] for axis in BATCH), -1)
    held = {host: [] for host in range(jax.process_count())}
    for row, devices in enumerate(rows):
        for host in {device.process_index for device in devices}:
            held[host].append(row)
    mine = held[jax.process_index()]
    size = len(mine)
    parts = (list(range(start, start + size)) for start in range(0, len(rows), size or 1))
    if (
        not size
        or len(rows) % size
        or not all(part in held.values() for part in parts)
        or len({len(part) for part in held.values()}) > 1
    ):
        fix = (
            f"{len(held)} hosts cannot share the batch evenly: use all their devices, with tensor x sequence a divisor "
            "of the devices of one host"
        )
        raise UserError("mesh", dict(mesh.shape), fix)
    return {"process_index": mine[0] // size, "process_count": len(rows) // size}


def parameter_sharding(mesh: Mesh, axes: tuple, shape: tuple[int, ...]) -> NamedSharding:
    """Sharding of one parameter by its logical axes. Leading axes from stacking are not split, nor is a dimension that
    is not divisible by its mesh axis."""
    axes = (None,) * (len(shape) - len(axes)) + tuple(axes)
    names = [SHARDING_RULES.get(axis) for axis in axes]
    spec = [
        name if name and size % mesh.shape[name] == 0 and names.index(name) == i else None
        for i, (name, size) in enumerate(zip(names, shape, strict=True))
    ]
    return NamedSharding(mesh, P(*spec))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Sharding of a batch: the leading dimension is split over the batch axes, tokens are not split."""
    return NamedSharding(mesh, P(BATCH))


def row_axes(mesh: Mesh) -> P:
    """The mesh axes that split activations [B, T, ...], and so the rows that kernels work on."""
    return P(BATCH, SHARDING_RULES["tokens"]) if mesh.shape["sequence"] > 1 else P(BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def pin_rows(mesh: Mesh):
    """A function that keeps activations [B, T, ...] between blocks split over batch and tokens only."""
    return lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, row_axes(mesh)))
