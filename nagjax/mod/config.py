"""Which sublayers are routed, and which share of the tokens each of them skips."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Annotated, Literal, NamedTuple

from nagjax.errors import UserError
from nagjax.ranges import Count, Fraction, NonNegative, Range, Share, check_fields

Rate = Annotated[float, Range(ge=0, lt=1)]


class Group(NamedTuple):
    """Blocks that one scan runs: a pattern of blocks, repeated `repeats` times. Each block has two rates."""

    start: int  # first block
    repeats: int
    rates: tuple[tuple[float, float], ...]  # per block of the pattern: attention's, MLP's

    @property
    def stop(self) -> int:
        return self.start + self.repeats * len(self.rates)


def kept(rate: float, tokens: int) -> int:
    """The number of tokens of a sequence that run, `ceil((1 - rate) * tokens)`: at least one if the rate is below 1. A
    product that is a whole number is not rounded up by a floating-point error."""
    return max(tokens - math.floor(rate * tokens + 1e-9), min(tokens, math.ceil(1.0 - rate)))


@dataclasses.dataclass(frozen=True)
class ModConfig:
    """Mixture-of-Depths (Raposo et al. 2024, arXiv:2404.02258): a share of the tokens skips each routed sublayer.

    A rate is the share of the tokens that skips. Several rates are stages: the depth is cut into as many equal
    parts, so that as many rates as blocks give each block its own. Stages of one rate share a scan.
    """

    # share of the tokens that skip each routed sublayer; several rates: the depth is cut into equal parts, with one
    # rate each
    rate: tuple[Rate, ...] = (0.0,)
    # share of the tokens that skip attention sublayers, in place of mod.rate; 1 removes these sublayers
    attention_rate: tuple[Share, ...] | None = None
    # share of the tokens that skip MLP sublayers, in place of mod.rate; 1 removes these sublayers
    mlp_rate: tuple[Share, ...] | None = None
    every: Count = 1  # route every n-th block; in the others all tokens run
    skip: Literal["attention,mlp", "attention", "mlp"] = "attention,mlp"  # kinds of sublayers that are routed
    # fixed: every routed sublayer has the rate; adaptive: the rate is their average, set by one threshold on their
    # scores
    capacity: Literal["fixed", "adaptive"] = "fixed"
    unit: Literal["sublayer", "block"] = "sublayer"  # what a token skips; block: attention and MLP together
    # nag, linear, skip_class, random; auto: nag for NAG, random where updates are normalised, else linear
    router: str = "auto"
    # factor on the update, from a linear router's score s. sigmoid: sigmoid(s); tanh: 1 + tanh(s); score: s
    weight: Literal["sigmoid", "tanh", "score"] = "sigmoid"
    kv: Literal["all", "selected"] = "all"  # tokens whose keys and values attention sees
    decider: str = "threshold"  # how skipping is decided causally, in sampling: threshold, predictor, aux_loss, balance
    ema: Fraction = 0.99  # threshold decider: decay of the moving average of the top-k cuts
    aux_weight: NonNegative = 0.01  # weight of a trained decider's own loss in the total loss

    def __post_init__(self):
        whole = "1 removes the sublayer"
        remove = ""
        if isinstance(self.rate, tuple) and any(isinstance(rate, int | float) and rate == 1 for rate in self.rate):
            remove = "to remove sublayers use --mod.attention-rate 1 or --mod.mlp-rate 1"
        check_fields(self, "mod.", rate=remove, attention_rate=whole, mlp_rate=whole)
        for field in ("rate", "attention_rate", "mlp_rate"):
            if getattr(self, field) == ():
                raise UserError(f"mod.{field}", (), "give one rate, or one for each stage")

        alone = {"skip": "attention,mlp", "attention_rate": None, "mlp_rate": None}
        if self.unit == "block" and (other := [name for name, usual in alone.items() if getattr(self, name) != usual]):
            fix = "whole blocks are skipped: give --mod.rate alone, or --mod.unit sublayer"
            raise UserError(f"mod.{other[0]}", getattr(self, other[0]), fix)

        for kind in ("attention", "mlp"):
            own = getattr(self, f"{kind}_rate")
            if kind not in self.skip.split(",") and any(own or ()):
                fix = f"has no effect: --mod.skip {self.skip} routes no such sublayers; leave one of the two out"
                raise UserError(f"mod.{kind}_rate", own, fix)

        if self.adaptive:
            for field, usual in (("attention_rate", None), ("mlp_rate", None), ("decider", "threshold")):
                if getattr(self, field) != usual:
                    fix = "one threshold rules all sublayers: leave it out, or use --mod.capacity fixed"
                    raise UserError(f"mod.{field}", getattr(self, field), fix)
            if len(self.rate) > 1:
                raise UserError("mod.rate", self.rate, "one threshold has one rate: give one, or --mod.capacity fixed")

    @property
    def adaptive(self) -> bool:
        """Whether one threshold chooses in all sublayers."""
        return self.capacity == "adaptive"

    @property
    def active(self) -> bool:
        """Whether any sublayer skips tokens."""
        return any(map(any, self._by_kind().values()))

    def named(self) -> tuple[str, tuple[float, ...]]:
        """The option by which tokens skip, with its rates; the first one if there are two. Only for an active
        config."""
        kind, rates = next((kind, rates) for kind, rates in self._by_kind().items() if any(rates))
        return self._option(kind), rates

    def _option(self, kind: str) -> str:
        """The name of the option that sets the rates of this kind of sublayer."""
        return f"mod.{kind}_rate" if getattr(self, f"{kind}_rate") else "mod.rate"

    def routes(self, kind: Literal["attention", "mlp"]) -> bool:
        """Whether any sublayer of this kind has to choose among its tokens: its rate is above 0 and below 1."""
        return any(0.0 < rate < 1.0 for rate in self._by_kind()[kind])

    def _by_kind(self) -> dict[str, tuple[float, ...]]:
        own = {"attention": self.attention_rate, "mlp": self.mlp_rate}
        return {kind: (rates or self.rate) if kind in self.skip.split(",") else (0.0,) for kind, rates in own.items()}

    def rates(self, depth: int) -> tuple[tuple[float, float], ...]:
        """The rates of attention and MLP, for each block. Raises UserError for more stages than blocks, and if `every`
        leaves no block in which a kind of sublayer with a rate above 0 is routed."""
        kinds = self._by_kind()
        for kind, stages in kinds.items():
            if len(stages) > depth:
                raise UserError(
                    self._option(kind), stages, f"{len(stages)} stages for {depth} blocks: give at most one per block"
                )
        routed = lambda block: (block + 1) % self.every == 0  # noqa: E731
        stage = lambda stages, block: stages[block * len(stages) // depth]  # noqa: E731
        rate = lambda stages, block: stage(stages, block) if routed(block) else 0.0  # noqa: E731
        rates = tuple((rate(kinds["attention"], b), rate(kinds["mlp"], b)) for b in range(depth))
        for kind, stages, own in zip(("attention", "MLP"), kinds.values(), zip(*rates, strict=True), strict=True):
            if any(stages) and not any(own):
                fix = f"skips no {kind} in any of {depth} blocks, whatever its rate: give a smaller number, or no rate"
                raise UserError("mod.every", self.every, fix)
        return rates

    def among(self, depth: int, stays: Sequence[int]) -> "ModConfig":
        """The config of a model that keeps the blocks `stays` of `depth` blocks, in which each has its present rates.
        Raises UserError under adaptive capacity if the routed blocks among them are not every n-th one."""
        rates = [self.rates(depth)[block] for block in stays]
        attention, mlp = zip(*rates, strict=True)
        if self.adaptive and any(map(any, rates)):
            for every in range(1, len(stays) + 1):
                short = dataclasses.replace(self, every=every)
                if short.rates(len(stays)) == tuple(rates):
                    return short
            routed = [i + 1 for i, own in enumerate(rates) if any(own)]
            fix = f"tokens would skip blocks {routed} of {len(stays)}, not every n-th, and one threshold has one rate: "
            raise UserError("blocks", [b + 1 for b in range(depth) if b not in stays], fix + "remove others")
        if self.unit == "block":
            return dataclasses.replace(self, every=1, capacity="fixed", rate=attention)
        return dataclasses.replace(self, every=1, capacity="fixed", attention_rate=attention, mlp_rate=mlp)

    def groups(self, depth: int) -> tuple[Group, ...]:
        """The scans that run the blocks: as few as possible with static shapes."""
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


def skips(mod: object) -> bool:
    """Whether tokens skip under `mod`, the entry of a config.json, which may hold any JSON value."""
    if not isinstance(mod, dict):
        return False
    kinds = str(mod.get("skip", "attention,mlp")).split(",")
    stages = [mod.get(f"{kind}_rate") or mod.get("rate") for kind in kinds]
    return any(any(own) for own in stages if isinstance(own, list | tuple))
