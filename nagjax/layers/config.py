"""Optional parts of a block, in which published models differ from each other."""

import dataclasses
from typing import Annotated, Literal

from nagjax.errors import UserError
from nagjax.ranges import Count, Fraction, Natural, NonNegative, Positive, Range, check_fields

GATED = ("swiglu", "geglu")  # feed-forward branches with a third matrix


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """Scaling of the rotary frequencies for a longer context than that of a model's first training.

    linear: all frequencies are divided by `factor` (Chen et al. 2023, arXiv:2306.15595). llama3: frequencies with a
    wavelength above `original / low` tokens are divided, those below `original / high` are not; in between, both are
    mixed with a weight that is linear in the frequency (Llama 3.1, arXiv:2407.21783). yarn: like llama3, but the weight
    is linear in the frequency's index, between indices rounded to whole numbers, and `attention` is above 1 (Peng et
    al. 2023, arXiv:2309.00071). longrope: each frequency has its own divisor (Ding et al. 2024, arXiv:2402.13753).
    """

    scaling: Literal["none", "linear", "llama3", "longrope", "yarn"] = "none"  # which frequencies are divided
    factor: Annotated[float, Range(ge=1)] = 1.0  # divisor of these frequencies
    low: Positive = 1.0  # llama3, yarn: frequencies of wavelengths above original / low are divided by the whole factor
    high: Positive = 4.0  # llama3, yarn: frequencies of wavelengths below original / high are not divided
    original: Count = 8192  # tokens of the context that the model was first trained with
    attention: Positive = 1.0  # factor on the queries and the keys that rotary turns
    divisors: tuple[Positive, ...] = ()  # longrope: number that the frequency of each pair of features is divided by

    def __post_init__(self):
        check_fields(self, "block.rope.")
        if not self.low < self.high:
            raise UserError("block.rope.low", self.low, f"give a number below block.rope.high = {self.high}")


@dataclasses.dataclass(frozen=True)
class OtherBlocks:
    """Blocks whose attention has another window or another rotary embedding than the rest."""

    places: tuple[Natural, ...] = ()  # 0-based places of the blocks whose attention differs, before pruning
    window: Count | None = None  # tokens that these blocks' attention sees, back from the query's own; None: all
    rotary: Literal["same", "none", "own"] = "same"  # their rotary: the rest's; none; by rope_base and rope
    rope_base: Positive = 10_000.0  # base of their own rotary
    rope: RopeConfig = RopeConfig()  # scaling of their own rotary

    def __post_init__(self):
        check_fields(self, "block.others.")
        if list(self.places) != sorted({*self.places}):
            raise UserError("block.others.places", self.places, "give places in ascending order")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Parts of a block that imported models may need. The defaults add nothing."""

    head_width: Count | None = None  # Dh; None: width / heads
    biases: tuple[Literal["qkv", "out", "mlp"], ...] = ()  # linear maps with a bias; qkv: queries, keys and values
    qk_gain: Literal["none", "head", "row"] = "none"  # gain of qk_norm: per feature of a head; row: of all heads
    qk_epsilon: Fraction = 1e-6  # epsilon of qk_norm
    rotated: Annotated[float, Range(gt=0, le=1)] = 1.0  # share of a head's features that rotary rotates: the first ones
    rope: RopeConfig = RopeConfig()  # rotary for longer contexts
    window: Count | None = None  # tokens that attention sees, counting back from the query's own; None: all
    softcap: Positive | None = None  # smooth limit on attention's logits
    cca: bool = False  # compressed convolutional attention (`nagjax.layers.compressed`): narrow by heads x head_width
    others: OtherBlocks = OtherBlocks()  # blocks for which the window and rotary are others

    def __post_init__(self):
        check_fields(self, "block.")


Target = Literal["attention", "mlp", "query", "key", "value", "out", "gate", "up", "down"]


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Adapters beside frozen matrices (`nagjax.layers.lora`), for a run that starts from another one."""

    rank: Natural = 0  # columns of an adapter's first factor, with --start; 0: no adapters, all parameters are trained
    alpha: Positive = 16.0  # an adapter's product is multiplied by alpha / rank
    targets: tuple[Target, ...] = ("attention", "mlp")  # the matrices that have an adapter: all of a branch, or by name

    def __post_init__(self):
        check_fields(self, "lora.")
        if self.rank and not self.targets:
            raise UserError("lora.targets", self.targets, "name at least one matrix, or use --lora.rank 0")

    @property
    def scale(self) -> float:
        return self.alpha / self.rank


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-Experts in place of the MLP of every block (`nagjax.layers.experts`)."""

    experts: Natural = 0  # experts of each block among which its tokens choose; 0: one MLP for all tokens
    active: Count = 2  # experts that each token chooses
    shared: Natural = 0  # experts that every token runs besides
    # features inside each expert; None: the MLP's divided by active + shared, so that a token costs as with one MLP
    hidden: Count | None = None
    score: Literal["softmax", "sigmoid"] = "softmax"  # an expert's score, made of the router's logits
    # weights of the chosen experts' outputs: their scores over the sum of these, or as they are
    weights: Literal["normalised", "score"] = "normalised"
    # dropless: ragged matmuls that run every choice; capacity: each expert has room for so many tokens
    dispatch: Literal["dropless", "capacity"] = "dropless"
    # an expert's room, relative to an equal share of a sequence's choices; sampling drops nothing
    capacity: Positive = 1.25
    load_weight: NonNegative = 0.01  # weight of the load-balance loss, summed over blocks
    z_weight: NonNegative = 0.001  # weight of the routers' z-loss, summed over blocks
    bias_rate: NonNegative = 0.0  # what an expert's balancing bias rises or falls by in every step; 0: no biases
    skips: Natural = 0  # further choices that run nothing: Mixture-of-Depths integrated into the choice

    def __post_init__(self):
        check_fields(self, "moe.")
        if not self.experts:
            return
        if self.active > self.experts:
            raise UserError("moe.active", self.active, f"give at most moe.experts = {self.experts}")
        if self.active == 1 and self.weights == "normalised":
            fix = "the weight of one chosen expert is always 1, so its router has no gradient: use --moe.weights score"
            raise UserError("moe.weights", self.weights, fix)

    def check_scheme(self, name: str, scale_free: bool) -> None:
        """Raises UserError where a router could not learn under this residual scheme. If only the direction of an
        update matters, the weight of a single expert, which scales the update, has no gradient, and neither has the
        choice between one expert and none."""
        if not self.experts or self.shared or not scale_free:
            return
        why = f"{name} normalises every update, so"
        if self.active == 1:
            fix = f"{why} one expert's weight has no gradient: use 2, or --moe.shared 1"
            raise UserError("moe.active", self.active, fix)
        if self.skips:
            fix = f"{why} whether a token runs an expert has no gradient: use 0, or --moe.shared 1"
            raise UserError("moe.skips", self.skips, fix)

    @property
    def choices(self) -> int:
        """The number of options among which a token chooses: experts and `skips`."""
        return self.experts + self.skips
