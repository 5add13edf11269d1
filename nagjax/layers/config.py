"""What a block may have beyond nagjax's own parts: where published models differ from each other."""

import dataclasses
from typing import Annotated, Literal

from nagjax.errors import UserError
from nagjax.ranges import Count, Fraction, Positive, Range, check_fields


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Rotary frequencies stretched for a longer context than a model was first trained at.

    linear: all divided by `factor` (Chen et al. 2023, arXiv:2306.15595). llama3: those of wavelengths beyond
    `original / low` tokens are, those below `original / high` are not, and between the two the share is linear in
    the frequency (Llama 3.1, arXiv:2407.21783).
    """

    scaling: Literal["none", "linear", "llama3"] = "none"  # which frequencies are divided
    factor: Annotated[float, Range(ge=1)] = 1.0  # by how much
    low: Positive = 1.0  # of llama3: wavelengths beyond original / low are divided whole
    high: Positive = 4.0  # of llama3: wavelengths below original / high are not divided
    original: Count = 8192  # tokens of the context that the model was first trained at

    def __post_init__(self):
        check_fields(self, "block.rope.")
        if not self.low < self.high:
            raise UserError("block.rope.low", self.low, f"give a number below block.rope.high = {self.high}")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Parts of a block that nagjax's own models do without. The defaults add nothing."""

    head_width: Count | None = None  # Dh; None: width / heads
    biases: tuple[Literal["qkv", "out", "mlp"], ...] = ()  # linear maps that add one; qkv: to queries, keys and values
    qk_gain: Literal["none", "head", "row"] = "none"  # of qk_norm: by feature of a head; row: all heads as one vector
    qk_epsilon: Fraction = 1e-6  # of qk_norm
    rotated: Annotated[float, Range(gt=0, le=1)] = 1.0  # share of a head's features that rotary turns, the first ones
    rope: RopeConfig = RopeConfig()  # rotary for longer contexts
    window: Count | None = None  # tokens that attention sees, the own one included; None: all before it

    def __post_init__(self):
        check_fields(self, "block.")
