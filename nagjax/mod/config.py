"""Which sublayers are routed, and what share of the tokens each of them keeps."""

import dataclasses
import math
from typing import Literal, NamedTuple

from nagjax.errors import UserError


class Group(NamedTuple):
    """Blocks that one scan runs over: `repeats` times a pattern of blocks, each with its two rates."""

    start: int  # first block
    repeats: int
    rates: tuple[tuple[float, float], ...]  # per block of the pattern: attention's, MLP's

    @property
    def stop(self) -> int:
        return self.start + self.repeats * len(self.rates)


def kept(rate: float, tokens: int) -> int:
    """Tokens of a sequence that run, `ceil((1 - rate) * tokens)`; whole products do not suffer from rounding."""
    return tokens - math.floor(rate * tokens + 1e-9)


@dataclasses.dataclass(frozen=True)
class ModConfig:
    """Mixture-of-Depths (Raposo et al. 2024, arXiv:2404.02258): a share of the tokens skips each routed sublayer.

    A rate is the share of the tokens that skips. Several rates are stages: the depth is cut into as many equal
    parts, so that as many rates as blocks give each block its own. Stages of one rate share a scan.
    """

    rate: tuple[float, ...] = (0.0,)  # of every routed sublayer, by stage
    attention_rate: tuple[float, ...] | None = None  # of attention sublayers instead; here 1 removes the sublayer
    mlp_rate: tuple[float, ...] | None = None  # of MLP sublayers instead; here 1 removes the sublayer
    every: int = 1  # route every n-th block; the others run all tokens
    skip: Literal["attention,mlp", "attention", "mlp"] = "attention,mlp"  # kinds of sublayers that are routed
    router: str = "auto"  # nag, linear, random; auto: nag on nag, random where updates are normalised, else linear
    kv: Literal["all", "selected"] = "all"  # tokens whose keys and values attention sees
    decider: str = "threshold"  # who decides causally, at sampling time: threshold, predictor, aux_loss
    ema: float = 0.99  # of the top-k cuts, for the threshold
    aux_weight: float = 0.01  # of a trained decider's cross-entropy in the loss

    def __post_init__(self):
        for field in ("rate", "attention_rate", "mlp_rate"):
            rates = getattr(self, field)
            whole = field != "rate"
            if rates is None and whole:
                continue
            if not rates or not all(0.0 <= rate < 1.0 or (whole and rate == 1.0) for rate in rates):
                fix = "give shares of skipped tokens in [0, 1)"
                fix += ", or 1 to remove the sublayer" if whole else "; to remove sublayers use --mod.mlp-rate 1"
                raise UserError(f"mod.{field}", rates, fix)
        if self.every < 1:
            raise UserError("mod.every", self.every, "give 1 to route every block, 2 for every other")
        if not 0.0 < self.ema < 1.0:
            raise UserError("mod.ema", self.ema, "give a decay above 0 and below 1")
        if self.aux_weight < 0:
            raise UserError("mod.aux_weight", self.aux_weight, "give a weight of at least 0")

    @property
    def active(self) -> bool:
        """Whether any sublayer skips anything."""
        return any(map(any, self._by_kind()))

    def routes(self, kind: Literal["attention", "mlp"]) -> bool:
        """Whether a sublayer of this kind has to choose among its tokens anywhere."""
        rates = dict(zip(("attention", "mlp"), self._by_kind(), strict=True))[kind]
        return any(0.0 < rate < 1.0 for rate in rates)

    def _by_kind(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        kinds = self.skip.split(",")
        given = {"attention": self.attention_rate, "mlp": self.mlp_rate}
        rates = [(given[kind] or self.rate) if kind in kinds else (0.0,) for kind in given]
        return rates[0], rates[1]

    def rates(self, depth: int) -> tuple[tuple[float, float], ...]:
        """Per block, the rates of its attention and its MLP. Raises UserError for more stages than blocks."""
        kinds = self._by_kind()
        for field, stages in zip(("mod.attention_rate", "mod.mlp_rate"), kinds, strict=True):
            if len(stages) > depth:
                raise UserError(field, stages, f"{len(stages)} stages for {depth} blocks: give at most one per block")
        routed = lambda block: (block + 1) % self.every == 0  # noqa: E731
        stage = lambda stages, block: stages[block * len(stages) // depth]  # noqa: E731
        return tuple(tuple(stage(s, b) if routed(b) else 0.0 for s in kinds) for b in range(depth))

    def groups(self, depth: int) -> tuple[Group, ...]:
        """The scans that run the blocks: as few as keep every shape static."""
        rates, groups = self.rates(depth), []
        for start in range(0, depth, self.every):
            pattern, repeats = rates[start : start + self.every], 1
            if len(set(pattern)) == 1:
                pattern, repeats = pattern[:1], len(pattern)
            if groups and groups[-1].rates == pattern:
                groups[-1] = groups[-1]._replace(repeats=groups[-1].repeats + repeats)
            else:
                groups.append(Group(start, repeats, pattern))
        return tuple(groups)
