"""What a block may have beyond nagjax's own parts: where published models differ from each other."""

import dataclasses
from typing import Literal

from nagjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary frequencies stretched for a longer context than a model was first trained at.

    linear: all divided by `factor` (Chen et al. 2023, arXiv:2306.15595). llama3: those of wavelengths beyond
    `original / low` tokens are, those below `original / high` are not, and between the two the share is linear in
    the frequency (Llama 3.1, arXiv:2407.21783).
    """

    scaling: Literal["none", "linear", "llama3"] = "none"
    factor: float = 1.0
    low: float = 1.0
    high: float = 4.0
    original: int = 8192  # tokens

    def __post_init__(self):
        if not self.factor >= 1.0:
            raise UserError("rope.factor", self.factor, "give a number of at least 1")
        if not 0.0 < self.low < self.high:
            raise UserError("rope.low", self.low, f"give a number above 0 and below rope.high = {self.high}")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Parts of a block that nagjax's own models do without. The defaults add nothing."""

    head_width: int | None = None  # Dh; None: width / heads
    biases: tuple[Literal["qkv", "out", "mlp"], ...] = ()  # linear maps that add one: to queries, keys, values; ...
    qk_gain: Literal["none", "head", "row"] = "none"  # of qk_norm: by feature of a head; row: all heads as one vector
    qk_epsilon: float = 1e-6  # of qk_norm
    rotated: float = 1.0  # share of a head's features that rotary turns, the first ones
    rope: RopeConfig = RopeConfig()
    window: int | None = None  # tokens that attention sees, the own one included; None: all before it

    def __post_init__(self):
        for field in ("head_width", "window"):
            value = getattr(self, field)
            if value is not None and value < 1:
                raise UserError(f"block.{field}", value, "give a whole number of at least 1, or leave it out")
        if not 0.0 < self.rotated <= 1.0:
            raise UserError("block.rotated", self.rotated, "give a share above 0 and up to 1")
        if not self.qk_epsilon > 0.0:
            raise UserError("block.qk_epsilon", self.qk_epsilon, "give a number above 0")
        if unknown := sorted(set(self.biases) - {"qkv", "out", "mlp"}):
            raise UserError("block.biases", unknown, "known: qkv, out, mlp")
