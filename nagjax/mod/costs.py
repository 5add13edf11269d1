"""Cost of a token: closed forms of FLOPs, executed parameters and cache, without the skipped sublayers."""

import math
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Float

from nagjax.mod.config import kept
from nagjax.mod.deciders import deciders
from nagjax.mod.routers import routers

PREDICTOR_PASSES = 2.0  # cost of training its matmuls, in forward passes: its input gets no gradient


class Costs(NamedTuple):
    """Averages per token of a full context. FLOPs count 2 per multiply-add of every matmul; kv_bytes is the cache in
    bytes."""

    forward: float
    # forward and backward pass, without the gradients of frozen branches and of a frozen head; what rematerialisation
    # computes again is not counted
    train: float
    executed_parameters: float  # all but those of matrices that a token skips
    kv_bytes: float


def costs(
    config,
    parameters: Any,
    router: str,
    decider: str,
    *,
    slots: int | None = None,
    shares: Float[np.ndarray, "L 2"] | None = None,
) -> Costs:
    """The costs of a model, from its config and the shapes of its parameters (a tree whose leaves have `.shape`; blocks
    are stacked).

    A routed sublayer runs `kept(rate, T) / T` of the tokens, or the `shares` given for attention and MLP of each block.
    Its router scores all tokens; if the score is made of a matmul that running tokens need anyway (`Router.recalls`),
    scoring these costs nothing more. A token runs its chosen experts, as if all experts were chosen equally often;
    computation for room that stays empty does not count. A query counts the keys that it may see: on average (T + 1) /
    2, fewer with a window, T in an encoder (selected tokens are taken as drawn at random). With `slots` it counts all
    keys of a cache with room for so many tokens, seen or not, as a dense backend computes them.

    With `slots` or `shares` the forward pass is that of sampling, in which the causal decider reads every token;
    otherwise it is that of training without its decider, whose cost `train` has.
    """
    blocks, tokens = parameters["blocks"], config.context
    branches = {kind: blocks[kind]["branch"] for kind in ("attention", "mlp")}
    average = lambda tree, frozen=False: _multiply_adds(tree, frozen) / config.depth  # noqa: E731
    adapters = {kind: blocks[kind].get("lora", {}) for kind in branches}
    stored = {kind: average((branch, adapters[kind])) for kind, branch in branches.items()}
    idle = sum(idle_experts(config, tree["mlp"]) for tree in (branches, adapters))
    active = stored | {"mlp": stored["mlp"] - idle / config.depth}
    gates, entries = ({kind: average(blocks[kind].get(part, {})) for kind in branches} for part in ("gate", "entry"))
    known = average([tree["attention"].get(name) for tree in (branches, adapters) for name in ("key", "value")])
    frozen = {kind: average(branch, frozen=True) for kind, branch in branches.items()}
    frozen["mlp"] -= idle_experts(config, branches["mlp"], frozen=True) / config.depth
    scorer = routers()[router]()
    learns = deciders()[decider]().learns(scorer)
    width = {kind: config.width if "routing" in blocks[kind] else 0 for kind in gates}  # a block has one of them
    score = {kind: scorer.multiply_adds(width[kind], gate) for kind, gate in gates.items()}
    guess = {kind: average(blocks[kind].get("routing", {}).get("decider", {})) for kind in gates}

    main = without = scoring = guessing = skipped = held = 0.0
    nominal = config.mod.rates(config.depth)
    planned = [[kept(rate, tokens) / tokens for rate in rates] for rates in nominal]
    shared = planned if shares is None else np.asarray(shares, np.float64).tolist()
    for own, rates, window in zip(shared, nominal, config.windows, strict=True):
        for kind, share, rate in zip(gates, own, rates, strict=True):
            # All tokens count for the entry: those that skip this sublayer are normalised for the next one, too.
            main += share * (active[kind] + gates[kind]) + entries[kind]
            without += share * frozen[kind]
            unused = stored[kind] - share * active[kind] + (1.0 - share) * gates[kind]
            if kind == "attention":
                everyone = config.mod.kv == "all" and share > 0.0
                keys = _seen(config, share, window) if slots is None else _multiplied(config, rate, slots)
                main += share * 2 * config.heads * config.head_width * keys
                if everyone:
                    main += (1.0 - share) * known
                    unused -= (1.0 - share) * known
                held += 1.0 if everyone or (config.mod.adaptive and share > 0.0) else share
            if 0.0 < rate < 1.0 and (kept(rate, tokens) < tokens or learns):
                recalled = scorer.recalls and not (kind == "mlp" and config.mod.unit == "block")
                scoring += score[kind] * (1.0 - share if recalled else 1.0)
                unused -= (1.0 - share) * scorer.multiply_adds(0, gates[kind])
                guessing += guess[kind]
            skipped += unused
    main += config.vocab * config.width + entries["attention"]  # the head has an entry like a sublayer's
    main += 0 if config.head_epsilon is None else config.width**2
    without += config.vocab * config.width * (not _trained(parameters.get("head", parameters["embedding"])["tokens"]))
    sampling = slots is not None or shares is not None
    total = sum(math.prod(p.shape) for p in jax.tree.leaves(parameters))
    return Costs(
        forward=2.0 * (main + scoring + (guessing if sampling else 0.0)),
        train=2.0 * (3.0 * main - without + scorer.passes * scoring + PREDICTOR_PASSES * guessing),
        executed_parameters=total - skipped,
        kv_bytes=2 * held * config.kv_heads * config.head_width * config.compute_dtype.itemsize,
    )


def idle_experts(config, branch: Any, frozen: bool = False) -> float:
    """Multiply-adds of the experts that a token does not choose, summed over the MLPs of all blocks. frozen: only those
    with matrices that are not trained."""
    own = {name: branch.get(name, ()) for name in ("gate", "up", "down")}
    experts = _multiply_adds(own, frozen) if config.moe.experts else 0.0
    return experts * (1.0 - config.moe.active / max(config.moe.choices, 1)) if experts else 0.0


def _seen(config, share: float, window: int | None) -> float:
    """The average number of keys that a query may see, in a context of which `share` runs attention: itself and the
    tokens before it in the window. If only selected tokens are seen, the latter are reduced to the share of the other
    tokens that run."""
    tokens = config.context
    if not config.causal:
        return tokens
    within = min(window or tokens, tokens)
    before = within - within * (within - 1) / (2 * tokens) - 1.0
    others = (share * tokens - 1.0) / (tokens - 1) if config.mod.kv == "selected" and tokens > 1 else 1.0
    return 1.0 + max(others, 0.0) * before


def _multiplied(config, rate: float, slots: int) -> int:
    """The number of keys with which a query is multiplied: all slots, or those of selected tokens
    (`Transformer.empty_cache`)."""
    selected = config.mod.kv == "selected" and not config.mod.adaptive
    return min(kept(rate, config.context), slots) if selected else slots


def mod_rates(config) -> dict[str, Any]:
    """Shares of the (token, sublayer) pairs of a full context that skip: total, attention, mlp, and each of the
    sublayers."""
    rates = [
        1.0 - kept(rate, config.context) / config.context for pair in config.mod.rates(config.depth) for rate in pair
    ]
    mean = lambda values: sum(values) / len(values)  # noqa: E731
    return {"total": mean(rates), "attention": mean(rates[::2]), "mlp": mean(rates[1::2]), "sublayers": rates}


def _multiply_adds(tree: Any, frozen: bool = False) -> float:
    """Multiply-adds of a token with all stacked matrices of a tree. frozen: only with those that are not trained."""
    leaves = (p for p in jax.tree.leaves(tree) if len(p.shape) >= 3)
    return float(sum(math.prod(p.shape) for p in leaves if not (frozen and _trained(p))))


def _trained(parameter: Any) -> bool:
    return getattr(parameter, "trained", True)
