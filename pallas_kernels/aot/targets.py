"""The chips that programs are compiled for, without having them."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from pathlib import Path

# By default libtpu asks a metadata server which machine it is on, and lets only one process at a time load it.
ENVIRONMENT = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}

H200_VARIABLE = "PALLAS_KERNELS_H200_CONFIG"


@dataclasses.dataclass(frozen=True)
class Target:
    """A chip to compile for: `topology` names four devices in the form of `jax.experimental.topologies`."""

    name: str
    platform: str
    topology: str


TARGETS = {
    t.name: t
    for t in (
        Target("v5e", "tpu", "v5e:2x2"),
        Target("v5p", "tpu", "v5p:2x2x1"),
        Target("v6e", "tpu", "v6e:2x2"),
        Target("h200", "cuda", "1x1x4"),
    )
}


def h200_config() -> Path:
    """The text description of an H200 that XLA publishes (`target_config/specs/h200.txtpb`).

    Named by the environment variable PALLAS_KERNELS_H200_CONFIG, else looked for in `../shared/reference`
    beside the repository.
    """
    beside = Path(__file__).parents[2].parent / "shared" / "reference" / "h200_target_config.txtpb"
    return Path(os.environ.get(H200_VARIABLE, beside))


def missing(target: Target) -> str | None:
    """What is missing for compiling for this target, or None."""
    if target.platform == "tpu":
        return None if _installed("libtpu") else "libtpu is not installed (pip install -e '.[aot]')"
    if not _installed("jax_plugins.xla_cuda13"):
        return "the CUDA plugin is not installed (see the aot target of the Makefile)"
    if not h200_config().is_file():
        return f"no description of an H200 at {h200_config()}; name one in {H200_VARIABLE}"
    return None


def devices(target: Target) -> list:
    """The target's four devices: descriptions to compile for, which cannot run anything."""
    from jax.experimental import topologies

    if target.platform == "tpu":
        return topologies.get_topology_desc(platform="tpu", topology_name=target.topology).devices
    return topologies.get_topology_desc(
        platform="cuda", target_config=h200_config().read_text(), topology=target.topology
    ).devices


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
