"""The platform for which a program is traced: the fastest code for a CPU differs from that for a GPU or TPU."""

import contextlib
import functools
import importlib.util
import logging
from collections.abc import Callable, Generator
from contextvars import ContextVar

import jax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from jaxtyping import Array

from pallas_kernels.launch import tracing_for as kernels_for
from pallas_kernels.placement import current_placement

logger = logging.getLogger("nagjax")

HEAD_AXIS = "tensor"  # mesh axis that splits heads and hidden features, if the mesh has it

_platform: ContextVar[str | None] = ContextVar("platform", default=None)


@contextlib.contextmanager
def tracing_for(platform: str) -> Generator[None]:
    """Inside this context, traces are for that platform (cpu, gpu, tpu), whatever platform this machine has."""
    token = _platform.set(platform)
    kernels = kernels_for(platform) if platform in ("cpu", "tpu") else contextlib.nullcontext()  # "gpu" names no vendor
    try:
        with kernels:
            yield
    finally:
        _platform.reset(token)


def platform() -> str:
    """The platform (cpu, gpu, tpu) named by `tracing_for`, otherwise this machine's."""
    return _platform.get() or jax.default_backend()


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """The platform (cpu, gpu, tpu) of a mesh. An abstract mesh has no devices; its platform is this machine's."""
    if isinstance(mesh, AbstractMesh):
        return jax.default_backend()
    name = mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else name


def head_axis(mesh: Mesh | AbstractMesh, heads: int) -> str | None:
    """The mesh axis that splits this number of heads; None if the heads are not split."""
    return HEAD_AXIS if HEAD_AXIS in mesh.shape and heads % mesh.shape[HEAD_AXIS] == 0 else None


def by_own_heads(local: Callable, q: Array, k: Array, v: Array, *by_row: Array) -> Array:
    """`local(q, k, v, *by_row)`. On a mesh it runs under `shard_map`: each device has its own sequences, whole, and its
    own heads if the number of key heads allows it. q, k, v: [B, T, H, Dh]; by_row: [B, ...]."""
    placement = current_placement()
    if placement is None:
        return local(q, k, v, *by_row)
    mesh, batch = placement.mesh, placement.rows[0]
    rows = P(batch, None, head_axis(mesh, k.shape[2]), None)
    specs = rows, rows, rows, *(P(batch) for _ in by_row)
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)(q, k, v, *by_row)


def on_one_cpu() -> bool:
    """Whether the program is for a CPU, and its rows are not split over a mesh."""
    return platform() == "cpu" and current_placement() is None


def on_gpu() -> bool:
    """Whether the program is for a GPU."""
    return platform() in ("gpu", "cuda", "rocm")


@functools.cache
def installed(packages: tuple[str, ...], without: str) -> bool:
    """Whether these packages are installed. Otherwise logs the warning `without`, once."""
    found = all(importlib.util.find_spec(package) is not None for package in packages)
    if not found:
        warn_once(without)
    return found


@functools.cache
def warn_once(text: str) -> None:
    logger.warning(text)


def joins_matmuls() -> bool:
    """Whether matmuls of one x with several weights are to be joined: on a GPU, where each is otherwise a pass over x
    and its cotangent. Not if the weights' columns are split over devices, which would then have to exchange them."""
    placement = current_placement()
    return on_gpu() and (placement is None or placement.mesh.shape.get(HEAD_AXIS, 1) == 1)
