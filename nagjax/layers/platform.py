"""For which platform a program is being traced: what is fastest on a CPU is not what is fastest elsewhere."""

import contextlib
from collections.abc import Generator
from contextvars import ContextVar

import jax
from jax.sharding import AbstractMesh, Mesh

from pallas_kernels.placement import current_placement

_platform: ContextVar[str | None] = ContextVar("platform", default=None)


@contextlib.contextmanager
def tracing_for(platform: str) -> Generator[None]:
    """What is traced inside is for that platform (cpu, gpu, tpu), whatever this machine is."""
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def platform() -> str:
    """cpu, gpu or tpu: the one named by `tracing_for`, else this machine's."""
    return _platform.get() or jax.default_backend()


def platform_of(mesh: Mesh | AbstractMesh) -> str:
    """cpu, gpu or tpu, also of devices that are only described; a mesh without any is for this machine's."""
    if isinstance(mesh, AbstractMesh):
        return jax.default_backend()
    name = mesh.devices.flat[0].platform
    return "gpu" if name in ("cuda", "rocm") else name


def on_one_cpu() -> bool:
    """Whether the program is for a CPU, and its rows are not split over a mesh."""
    return platform() == "cpu" and current_placement() is None
