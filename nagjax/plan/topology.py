"""Names of machines: `v5e:4x4` is a TPU slice with its shape, `h200x8` a machine with 8 GPUs. A slice may also be given
by its accelerator type on Google Cloud: `v5e-16` or `v5litepod-16` is v5e:4x4, and `v5p-16`, which counts the two
TensorCores of each chip, is v5p:2x2x2."""

import dataclasses
import difflib
import importlib.util
import math
import re

from nagjax.errors import UserError
from nagjax.plan.chips import CHIPS, Chip

INSTALL = "pip install -e '.[aot]'"
CORES = {"v5p": 2}  # TensorCores per chip, for chips whose accelerator types count these


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips and their layout; a GPU machine has one dimension."""

    chip: Chip
    shape: tuple[int, ...]

    @property
    def name(self) -> str:
        return self.chip.spelled("x".join(map(str, self.shape)))

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def egress(self) -> float:
        """Bytes/s that one chip can send in this layout. A dimension of a torus gives two links, but only one if it has
        two chips, and none if it has one."""
        if self.chip.links == 1:
            return self.chip.egress
        used = sum(min(size - 1, 2) for size in self.shape)
        return self.chip.egress * used / self.chip.links

    def devices(self) -> list:
        """The device descriptions to compile for. Needs the compilers, and a process with their environment
        variables."""
        from jax.experimental import topologies

        if self.chip.platform == "tpu":
            return list(topologies.get_topology_desc(platform="tpu", topology_name=self.name).devices)
        described = topologies.get_topology_desc(
            platform="cuda", target_config=self.chip.description, topology=f"1x1x{self.size}"
        )
        return list(described.devices)


def known() -> list[str]:
    """All names of topologies, grouped by chip."""
    return [chip.spelled(shape) for chip in CHIPS.values() for shape in chip.shapes]


def parse(name: str) -> Topology:
    """The topology of this name, whatever its case. Raises UserError with the nearest known name."""
    if rented := _rented(name.strip().lower()):
        return rented
    found = re.fullmatch(r"(tpu-)?(\w+?)(?::(\d+(?:x\d+)*)|x(\d+))", name.strip().lower())
    chip = CHIPS.get(found[2]) if found else None
    if chip:
        shape = found[3] or found[4]
        if shape in chip.shapes:
            return Topology(chip, tuple(int(n) for n in shape.split("x")))
    raise UserError("topology", name, f"did you mean {_nearest(name.lower())}? known: {summary()}")


def _rented(name: str) -> Topology | None:
    """The slice that an accelerator type names, such as v5litepod-16; None for other names."""
    found = re.fullmatch(r"(v5litepod|v5e|v5p|v6e)-(\d+)", name)
    if not found:
        return None
    chip = CHIPS["v5e" if found[1] == "v5litepod" else found[1]]
    chips = int(found[2]) / CORES.get(chip.name, 1)
    slices = (Topology(chip, tuple(map(int, shape.split("x")))) for shape in chip.shapes)
    return next((own for own in slices if own.size == chips), None)


def summary() -> str:
    """All names of topologies in a short form."""
    return "; ".join(f"{chip.spelled(chip.shapes[0])}, {', '.join(chip.shapes[1:])}" for chip in CHIPS.values())


def missing(chip: Chip) -> str | None:
    """The package that must be installed to compile for this chip, or None."""
    if chip.platform == "tpu" and not _installed("libtpu"):
        return "the TPU compiler (libtpu)"
    if chip.platform == "cuda" and not _installed("jax_plugins.xla_cuda13"):
        return "the GPU compiler (JAX's CUDA plugin)"
    return None


def require(topology: Topology) -> None:
    """Raises UserError with the command that installs what is missing."""
    if absent := missing(topology.chip):
        raise UserError("topology", topology.name, f"{absent} is not installed: {INSTALL}")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _nearest(name: str) -> str:
    """The nearest known name: by size if the chip is known, otherwise by spelling."""
    name = re.sub("^v5litepod", "v5e", name)
    chip = next((chip for chip in CHIPS.values() if name.startswith(chip.name)), None)
    numbers = [int(n) for n in re.findall(r"\d+", name.replace(chip.name, "", 1))] if chip else []
    if numbers and all(numbers):
        wanted = math.prod(numbers) / (CORES.get(chip.name, 1) if re.fullmatch(r"\w+-\d+", name) else 1)
        distance = lambda shape: abs(math.log(math.prod(map(int, shape.split("x"))) / wanted))  # noqa: E731
        return chip.spelled(min(chip.shapes, key=distance))
    if chip:
        return chip.spelled(chip.shapes[0])
    return difflib.get_close_matches(name, known(), n=1, cutoff=0.0)[0]
