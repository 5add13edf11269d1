"""The mesh, and the one table that says which logical axis lives on which mesh axis."""

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
    "batch": ("data", "fsdp"),  # activations: sequences
    "tokens": "sequence",  # and the tokens of each
    "embed": "fsdp",
    "embed_out": "tensor",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}

BATCH = SHARDING_RULES["batch"]
AXES = tuple(field.name for field in dataclasses.fields(MeshConfig))


def make_mesh(config: MeshConfig, devices=None) -> Mesh:
    """Mesh with axes data, fsdp, tensor, sequence (Auto) over `devices` (all there are)."""
    devices = list(jax.devices() if devices is None else devices)
    model = config.fsdp * config.tensor * config.sequence
    data = config.data or max(len(devices) // model, 1)
    shape = (data, config.fsdp, config.tensor, config.sequence)
    if data * model > len(devices) or (config.data is None and data * model != len(devices)):
        fix = f"there are {len(devices)} devices: {' x '.join(AXES)} must fill them, or give a smaller --mesh.data"
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
    """Raises UserError where the tokens of a sequence cannot be split over the mesh's `sequence` axis."""
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
    """Which part of a batch this process loads, and of how many: `process_index`, `process_count` for `batches`.

    Hosts that hold the same rows (a tensor or sequence axis across hosts) load the same. Raises UserError if the
    hosts' rows are not parts of equal size, or a host has no device in the mesh.
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
        fix = f"cannot be shared by {len(held)} hosts evenly: use all their devices, the other axes dividing a host's"
        raise UserError("mesh", dict(mesh.shape), fix)
    return {"process_index": mine[0] // size, "process_count": len(rows) // size}


def parameter_sharding(mesh: Mesh, axes: tuple, shape: tuple[int, ...]) -> NamedSharding:
    """Sharding of one parameter by its logical axes. Stacking adds leading axes, which stay whole; so does a
    dimension its mesh axis does not divide."""
    axes = (None,) * (len(shape) - len(axes)) + tuple(axes)
    names = [SHARDING_RULES.get(axis) for axis in axes]
    spec = [
        name if name and size % mesh.shape[name] == 0 and names.index(name) == i else None
        for i, (name, size) in enumerate(zip(names, shape, strict=True))
    ]
    return NamedSharding(mesh, P(*spec))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Leading dimension over the batch axes; the tokens of a sequence are everywhere."""
    return NamedSharding(mesh, P(BATCH))


def row_axes(mesh: Mesh) -> P:
    """Of activations [B, T, ...], and so of the rows that kernels work on."""
    return P(BATCH, SHARDING_RULES["tokens"]) if mesh.shape["sequence"] > 1 else P(BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def pin_rows(mesh: Mesh):
    """Keeps activations [B, T, ...] split over the batch and the tokens only, between blocks."""
    return lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, row_axes(mesh)))
