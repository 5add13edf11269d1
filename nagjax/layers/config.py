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

    scaling: Literal["none", "linear", "llama3", "longrope", "yarn"] = "none"  # rotary scaling for a longer context
    factor: Annotated[float, Range(ge=1)] = 1.0  # divisor of the frequencies
    low: Positive = 1.0  # llama3, yarn: frequencies with a wavelength above original / low are divided by the factor
    high: Positive = 4.0  # llama3, yarn: frequencies with a wavelength below original / high are not divided
    original: Count = 8192  # context, in tokens, with which the model was first trained
    attention: Positive = 1.0  # factor on the rotated features of queries and keys
    divisors: tuple[Positive, ...] = ()  # longrope: one divisor for the frequency of each pair of features

    def __post_init__(self):
        check_fields(self, "block.rope.")
        if not (self.low < self.high or self.scaling == "yarn" and self.low == self.high):
            raise UserError("block.rope.low", self.low, f"give a number below block.rope.high = {self.high}")


@dataclasses.dataclass(frozen=True)
class OtherBlocks:
    """Blocks whose attention has another window or another rotary embedding than the rest."""

    places: tuple[Natural, ...] = ()  # 0-based positions, before pruning, of the blocks whose attention differs
    window: Count | None = None  # tokens that a query of these blocks sees, back from its own; None: all
    rotary: Literal["same", "none", "own"] = "same"  # rotary of these blocks; own: by others.rope_base and others.rope
    rope_base: Positive = 10_000.0  # base of their own rotary frequencies
    rope: RopeConfig = RopeConfig()  # scaling of their own rotary

    def __post_init__(self):
        check_fields(self, "block.others.")
        if list(self.places) != sorted({*self.places}):
            raise UserError("block.others.places", self.places, "give places in ascending order")


@dataclasses.dataclass(frozen=True)
class BlockConfig:
    """Parts of a block that imported models may need. The defaults add nothing."""

    head_width: Count | None = None  # features of a head (Dh); None: width / heads
    biases: tuple[Literal["qkv", "out", "mlp"], ...] = ()  # linear layers with a bias; qkv: queries, keys and values
    # learned gains of qk_norm. head: one per feature, the same for all heads; row: norm and gains over all heads
    # together
    qk_gain: Literal["none", "head", "row"] = "none"
    qk_epsilon: Fraction = 1e-6  # epsilon of qk_norm
    rotated: Annotated[float, Range(gt=0, le=1)] = 1.0  # share of a head's features that rotary rotates: the first ones
    rope: RopeConfig = RopeConfig()  # rotary for longer contexts
    window: Count | None = None  # tokens that a query sees, counted back from its own; None: all
    softcap: Positive | None = None  # soft cap c on attention's logits: c tanh(logits / c)
    cca: bool = False  # compressed convolutional attention (`nagjax.layers.compressed`) in heads x head_width features
    others: OtherBlocks = OtherBlocks()  # blocks for which the window and rotary are others

    def __post_init__(self):
        check_fields(self, "block.")


Target = Literal["attention", "mlp", "query", "key", "value", "out", "gate", "up", "down"]


@dataclasses.dataclass(frozen=True)
class LoRAConfig:
    """Adapters beside frozen matrices (`nagjax.layers.lora`), for a run that starts from another one."""

    rank: Natural = 0  # rank of the adapters, for a run with --start; 0: no adapters, all parameters are trained
    alpha: Positive = 16.0  # the product of an adapter's two factors is multiplied by alpha / rank
    targets: tuple[Target, ...] = ("attention", "mlp")  # matrices with an adapter; attention, mlp: all of that branch

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

    experts: Natural = 0  # number of experts in each block, from which every token chooses; 0: one MLP for all tokens
    active: Count = 2  # number of experts that each token chooses
    shared: Natural = 0  # additional experts that every token runs
    # features inside each expert; None: the MLP's hidden / (active + shared), so that a token costs as with one MLP
    hidden: Count | None = None
    score: Literal["softmax", "sigmoid"] = "softmax"  # how scores are computed from the router's logits
    # weights of the chosen experts' outputs. normalised: their scores, divided by the sum of these; score: the scores
    # themselves
    weights: Literal["normalised", "score"] = "normalised"
    # dropless: every choice runs, by ragged matmuls; capacity: an expert has limited room, and drops further choices
    dispatch: Literal["dropless", "capacity"] = "dropless"
    # an expert's room, relative to an equal share of a sequence's choices; in sampling nothing is dropped
    capacity: Positive = 1.25
    load_weight: NonNegative = 0.01  # weight of the load-balance loss, summed over blocks
    z_weight: NonNegative = 0.001  # weight of the routers' z-loss, summed over blocks
    bias_rate: NonNegative = 0.0  # how much an expert's balancing bias rises or falls in every step; 0: no biases
    skips: Natural = 0  # additional choices that run no expert, which integrates Mixture-of-Depths into the routing

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
