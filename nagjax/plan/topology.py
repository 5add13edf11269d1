"""Names of machines: `v5e:4x4` is a TPU slice by its shape, `h200x8` a box of GPUs by their number."""

import dataclasses
import difflib
import importlib.util
import math
import re

from nagjax.errors import UserError
from nagjax.plan.chips import CHIPS, Chip

INSTALL = "pip install -e '.[aot]'"


@dataclasses.dataclass(frozen=True)
class Topology:
    """Chips and how they are laid out; a GPU box has one dimension."""

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
        """Bytes/s one chip can send here: a torus dimension of two chips has one link instead of two, one of one
        chip none."""
        if self.chip.links == 1:
            return self.chip.egress
        used = sum(min(size - 1, 2) for size in self.shape)
        return self.chip.egress * used / self.chip.links

    def devices(self) -> list:
        """Descriptions to compile for; needs the compilers, in a process that has their environment."""
        from jax.experimental import topologies

        if self.chip.platform == "tpu":
            return list(topologies.get_topology_desc(platform="tpu", topology_name=self.name).devices)
        described = topologies.get_topology_desc(
            platform="cuda", target_config=self.chip.description, topology=f"1x1x{self.size}"
        )
        return list(described.devices)


def known() -> list[str]:
    """All names, chip by chip."""
    return [chip.spelled(shape) for chip in CHIPS.values() for shape in chip.shapes]


def parse(name: str) -> Topology:
    """The topology of that name, in any case.

    Raises UserError with the nearest known name.
    """
    found = re.fullmatch(r"(tpu-)?(\w+?)(?::(\d+(?:x\d+)*)|x(\d+))", name.strip().lower())
    chip = CHIPS.get(found[2]) if found else None
    if chip:
        shape = found[3] or found[4]
        if shape in chip.shapes:
            return Topology(chip, tuple(int(n) for n in shape.split("x")))
    raise UserError("topology", name, f"did you mean {_nearest(name.lower())}? known: {summary()}")


def summary() -> str:
    """All names, shortly."""
    return "; ".join(f"{chip.spelled(chip.shapes[0])}, {', '.join(chip.shapes[1:])}" for chip in CHIPS.values())


def missing(chip: Chip) -> str | None:
    """What must be installed before this chip can be compiled for, or None."""
    if chip.platform == "tpu" and not _installed("libtpu"):
        return "the TPU compiler (libtpu)"
    if chip.platform == "cuda" and not _installed("jax_plugins.xla_cuda13"):
        return "the GPU compiler (JAX's CUDA plugin)"
    return None


def require(chip: Chip) -> None:
    """Raises UserError with the command that installs what is missing."""
    if absent := missing(chip):
        raise UserError("topology", chip.name, f"{absent} is not installed: {INSTALL}")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _nearest(name: str) -> str:
    """The known name most like it: of the same chip the nearest in size, else the nearest in spelling."""
    chip = next((chip for chip in CHIPS.values() if name.startswith(chip.name)), None)
    numbers = [int(n) for n in re.findall(r"\d+", name.replace(chip.name, "", 1))] if chip else []
    if numbers and all(numbers):
        wanted = math.prod(numbers)
        distance = lambda shape: abs(math.log(math.prod(map(int, shape.split("x"))) / wanted))  # noqa: E731
        return chip.spelled(min(chip.shapes, key=distance))
    if chip:
        return chip.spelled(chip.shapes[0])
    return difflib.get_close_matches(name, known(), n=1, cutoff=0.0)[0]
