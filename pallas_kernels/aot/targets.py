"""The chips for which programs are compiled, without having them."""

import dataclasses
import importlib.util
import os

from jax.sharding import AbstractDevice, AbstractMesh

from pallas_kernels.aot.ptx import assembler

# By default libtpu asks a metadata server which machine it is on, and lets only one process at a time load it.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}


def compilers_environment() -> dict[str, str]:
    """The environment of a process that compiles for chips that are not present. XLA takes the first `ptxas` on PATH:
    this puts the wheels' one, which is as new as Triton's programs, before that of an older CUDA."""
    ptxas = assembler()
    first = [os.path.dirname(ptxas)] if ptxas else []
    return os.environ | ENVIRONMENT | {"PATH": os.pathsep.join([*first, os.environ.get("PATH", os.defpath)])}


# Shared memory of a multiprocessor and of a program, threads and float32 units of a multiprocessor, by compute
# capability: tables of the CUDA C programming guide.
LIMITS = {
    (7, 5): (65536, 65536, 1024, 64),
    (8, 0): (167936, 166912, 2048, 64),
    (9, 0): (233472, 232448, 2048, 128),
    (10, 0): (233472, 232448, 2048, 128),
}


def gpu_description(
    name: str, memory: int, bandwidth: float, capability: tuple[int, int] = (9, 0), cores: int = 132,
    cache: int = 52428800, clock: float = 1.98
) -> str:  # fmt: skip
    """An NVIDIA GPU in the form XLA's compiler reads (GpuTargetConfigProto).

    Args:
      name, memory, bandwidth: as the driver names it; bytes; bytes per second.
      capability: compute capability, on which the limits of a program depend.
      cores, cache, clock: multiprocessors, bytes of the last-level cache, GHz.
    """
    shared, of_program, threads, units = LIMITS[capability]
    features = " feature_extension: ACCELERATED_FEATURES" if capability >= (9, 0) else ""
    minor = f" minor: {capability[1]}" if capability[1] else ""
    return f"""
gpu_device_info {{
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: {of_program}
  shared_memory_per_core: {shared}
  threads_per_core_limit: {threads}
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  core_count: {cores}
  fpus_per_core: {units}
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  memory_bandwidth: {bandwidth:.0f}
  l2_cache_size: {cache}
  clock_rate_ghz: {clock}
  device_memory_size: {memory}
  cuda_compute_capability {{ major: {capability[0]}{minor}{features} }}
  device_vendor: "NVIDIA Corporation"
  device_address_bits: 64
  name: "{name}"
  driver_version: "13.0.0"
  runtime_version: "12.8.0"
  compile_time_toolkit_version: "12.8.0"
  dnn_version: "9.10.0"
  device_interconnect_info {{ active_links: 18 }}
}}
platform_name: "CUDA"
device_description_str: "{name}"
"""


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip to compile for.

    Args:
      topology: four devices in the form of `jax.experimental.topologies`.
      best: the implementation of row kernels that `implementation=None` has to take there.
      kind, description: what JAX calls a GPU, and XLA's description of it.
    """

    name: str
    platform: str
    topology: str
    best: str
    kind: str = ""
    description: str = ""


def _gpu(name: str, best: str, kind: str, *facts) -> Target:
    return Target(name, "cuda", "1x1x4", best, kind, gpu_description(kind, *facts))


TARGETS = {
    t.name: t
    for t in (
        Target("v5e", "tpu", "v5e:2x2", "mosaic_tpu"),
        Target("v5p", "tpu", "v5p:2x2x1", "mosaic_tpu"),
        Target("v6e", "tpu", "v6e:2x2", "mosaic_tpu"),
        _gpu("t4", "xla", "Tesla T4", 15 * 2**30, 320e9, (7, 5), 40, 4 * 2**20, 1.59),
        _gpu("a100", "pallas_triton", "NVIDIA A100-SXM4-80GB", 80 * 2**30, 2039e9, (8, 0), 108, 40 * 2**20, 1.41),
        _gpu("h200", "pallas_triton", "NVIDIA H200", 151397597184, 4.8e12),
        Target("mi300", "rocm", "", "pallas_triton", "gfx942"),
        _gpu("b200", "pallas_triton", "NVIDIA B200", 180 * 2**30, 8e12, (10, 0), 148, 126 * 2**20, 1.965),
    )
}


def abstract_mesh(target: Target) -> AbstractMesh:
    """A mesh that tells a kernel traced inside it for which chip it is."""
    return AbstractMesh((), (), abstract_device=AbstractDevice(target.kind, None, "gpu") if target.kind else None)


def missing(target: Target) -> str | None:
    """What is missing to compile for this target; None if nothing is."""
    if target.platform == "tpu":
        return None if _installed("libtpu") else "libtpu is not installed (pip install -e '.[aot]')"
    if target.platform == "rocm":
        return None if _installed("triton") else "triton is not installed (extra `triton`)"
    return None if _installed("jax_plugins.xla_cuda13") else "the CUDA plugin is not installed (extra `aot`)"


def devices(target: Target) -> list:
    """The target's four devices: descriptions for the compiler, which cannot run anything. Empty for AMD."""
    if target.platform == "rocm":
        return []
    from jax.experimental import topologies

    if target.platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices
    config = dict(target_config=target.description, topology=target.topology)
    return topologies.get_topology_desc(platform="cuda", **config).devices


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
