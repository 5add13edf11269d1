"""The device mesh, and the one table that maps logical axes to mesh axes."""

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
    "batch": ("data", "fsdp", "expert"),  # sequences of activations
    "tokens": "sequence",  # tokens of each sequence
    "embed": "fsdp",
    "embed_out": "tensor",
    "heads": "tensor",
    "mlp": "tensor",
    "experts": "expert",
    "vocab": "tensor",
}

BATCH = SHARDING_RULES["batch"]
AXES = ("data", "fsdp", "expert", "tensor", "sequence")  # the axes that split the batch come first
PLATFORM_OF = {  # implementations that run on one platform only
    "kernels": {"mosaic_tpu": "tpu", "pallas_triton": "gpu", "mosaic_gpu": "gpu", "triton": "gpu"},
    "attention": {"splash": "tpu", "cudnn": "gpu", "tokamax": "gpu"},
}


def make_mesh(config: MeshConfig, devices=None) -> Mesh:
    """A mesh with the axes `AXES`, all of type Auto, over `devices` (default: all)."""
    devices = list(jax.devices() if devices is None else devices)
    model = config.fsdp * config.expert * config.tensor * config.sequence
    data = config.data or max(len(devices) // model, 1)
    shape = (data, config.fsdp, config.expert, config.tensor, config.sequence)
    if data * model > len(devices) or (config.data is None and data * model != len(devices)):
        given = " x ".join(f"{axis} {getattr(config, axis)}" for axis in AXES if getattr(config, axis) not in (None, 1))
        most = "at most" if config.data else "a divisor of"
        larger = "data" if config.data and model <= len(devices) else max(AXES[1:], key=lambda a: getattr(config, a))
        fix = f"their product has to be {most} {len(devices)}, the number of devices: change --mesh.{larger}"
        raise UserError("mesh", given, fix)
    return Mesh(np.array(devices[: data * model]).reshape(shape), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def local_devices(count: int) -> list[jax.Device]:
    """The first `count` devices of this machine. Raises UserError if it has fewer."""
    there = jax.local_devices()
    if count > len(there):
        raise UserError("devices", count, f"this machine has {len(there)}")
    return there[:count]


def batch_parts(shape: Mapping[str, int]) -> int:
    """The number of parts that a mesh of this shape splits a batch's sequences into."""
    return math.prod(shape[axis] for axis in BATCH)


def check_rows(batch: int, accumulate: int, shape: Mapping[str, int]) -> None:
    """Raises UserError if the batch, or each of its `accumulate` parts, does not divide over the mesh's batch axes."""
    shards = batch_parts(shape)
    if batch // accumulate % shards:
        fitting = max(batch // accumulate // shards, 1) * shards * accumulate
        axes = " x ".join(axis for axis in BATCH if axis != "expert" or shape[axis] > 1)
        raise UserError("batch", batch, f"batch / accumulate must be divisible by {axes} = {shards}; try {fitting}")


def check_devices(batch: int, shape: Mapping[str, int]) -> None:
    """Raises UserError if the batch of a finished run does not divide over the devices on which the run is opened."""
    if batch % (parts := batch_parts(shape)):
        fitting = next(count for count in range(parts, 0, -1) if batch % count == 0)
        raise UserError(
            "devices", parts, f"the run's batches have {batch} sequences: give a divisor, such as {fitting}"
        )


def check_platform(model: ModelConfig, there: str) -> None:
    """Raises UserError if an implementation was chosen by name that does not run on the platform `there`."""
    for field, platforms in PLATFORM_OF.items():
        value = getattr(model, field)
        needed = platforms.get(value, there)
        if needed != there:
            raise UserError(field, value, f"runs on {needed} only, and this is {there}; use auto or xla")


def check_sequence(model: ModelConfig, shape: Mapping[str, int]) -> None:
    """Raises UserError if the mesh's `sequence` axis cannot split the tokens of a sequence."""
    parts = shape["sequence"]
    if parts == 1:
        return
    if model.context % parts:
        fitting = max(model.context // parts, 1) * parts
        raise UserError("context", model.context, f"must be divisible by mesh.sequence = {parts}; try {fitting}")
    if model.mod.active:
        fix = "Mixture-of-Depths chooses among all tokens of a sequence: use mesh.sequence 1 and more fsdp or tensor"
        raise UserError("mesh.sequence", parts, fix)
    if model.attention in ("cudnn", "tokamax"):
        fix = f"needs whole sequences, not mesh.sequence = {parts}: choose auto or xla"
        raise UserError("attention", model.attention, fix)


def check_experts(model: ModelConfig, shape: Mapping[str, int]) -> None:
    """Raises UserError if the mesh cannot split the model's experts."""
    parts, moe = shape["expert"], model.moe
    if parts > 1 and (not moe.experts or moe.experts % parts):
        fix = (
            f"moe.experts = {moe.experts} must be divisible by it" if moe.experts else "the model has no experts: use 1"
        )
        raise UserError("mesh.expert", parts, fix)
    if moe.experts and moe.dispatch == "capacity" and shape["sequence"] > 1:
        fix = "experts have room for tokens of whole sequences: use --moe.dispatch dropless, or mesh.sequence 1"
        raise UserError("moe.dispatch", moe.dispatch, fix)


def batch_share(mesh: Mesh) -> dict[str, int]:
    """The part of a batch that this process loads and the number of parts, as `process_index` and `process_count`.

    Hosts that hold the same sequences (because a tensor or sequence axis crosses hosts) load the same part. Raises
    UserError if the hosts' parts differ in size, or if a host has no device in the mesh.
    """
    rows = mesh.devices.reshape(batch_parts(mesh.shape), -1)
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
    """The sharding of a parameter of this shape by the logical names of its last axes. Leading axes that come from
    stacking are not split, nor is a dimension whose size its mesh axis does not divide."""
    axes = (None,) * (len(shape) - len(axes)) + tuple(axes)
    names = [SHARDING_RULES.get(axis) for axis in axes]
    spec = [
        name if name and size % mesh.shape[name] == 0 and names.index(name) == i else None
        for i, (name, size) in enumerate(zip(names, shape, strict=True))
    ]
    return NamedSharding(mesh, P(*spec))


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """The sharding of a batch: the batch axes split the leading dimension, and nothing splits the tokens."""
    return NamedSharding(mesh, P(BATCH))


def row_axes(mesh: Mesh) -> P:
    """The mesh axes that split activations [B, T, ...] by batch and tokens, and so split the rows that kernels work
    on."""
    return P(BATCH, SHARDING_RULES["tokens"]) if mesh.shape["sequence"] > 1 else P(BATCH)


def replicated(mesh: Mesh) -> NamedSharding:
    return NamedSharding(mesh, P())


def for_every_process[T](x: T, mesh: Mesh | None) -> T:
    """`x` with all its values on every device of the mesh, so that every process can fetch them."""
    return jax.lax.with_sharding_constraint(x, replicated(mesh)) if mesh else x


def pin_rows(mesh: Mesh):
    """A function that constrains activations [B, T, ...] between blocks to be split over batch and tokens only."""
    return lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, row_axes(mesh)))
