"""Rules that choose blocks to remove, and a model's loss without these blocks."""

import functools
from collections.abc import Sequence
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float

from nagjax.discovery import pick
from nagjax.errors import UserError
from nagjax.measure import angles, counted
from nagjax.measure.interventions import without
from nagjax.measure.norms import cosine
from nagjax.model.transformer import BlockCall, Output, Transformer
from nagjax.ranges import Range, check_value
from nagjax.runs.opening import OpenRun
from nagjax.train.head_loss import head_loss
from nagjax.train.loss import Batch

RULES = {
    "late": "the deepest blocks",
    "penultimate": "the deepest blocks but the last one (Gromov et al.'s simpler rule)",
    "influence": "the blocks of least influence, 1 - cos(h_l, h_l+1) (ShortGPT)",
    "angle": "the consecutive blocks over which the residual turns least (Gromov et al.)",
    "drop": "the blocks whose removal alone adds least to the loss",
}
ROWS = 8  # most sequences of a batch on which angles are measured: those with most counted tokens


def check_rules(rules: Sequence[str]) -> None:
    """Raises UserError for an unknown rule, for a string in place of a list, and for an empty list."""
    if not rules or isinstance(rules, str):
        raise UserError("rules", rules, f"name at least one of {', '.join(RULES)}")
    for rule in rules:
        pick("rule", rule, RULES, "rules")


def choose(
    rule: str,
    count: int,
    cosine: Float[np.ndarray, "L+1 L+1"],
    angle: Float[np.ndarray, "L+1 L+1"],
    damage: Float[np.ndarray, " L"] | None = None,
) -> list[int]:
    """Chooses the blocks to remove, in ascending order, from mean cosines and angles between the residuals before and
    after them. The rule "drop" needs `damage`, what each block's removal adds to the loss; a value that is not finite
    counts as the largest.

    Raises UserError for an unknown rule, for a count that is not from 0 to the number of blocks, and if what the rule
    compares is missing or could not be measured.
    """
    check_rules([rule])
    depth = len(cosine) - 1
    check_value("count", count, Annotated[int, Range(ge=0, le=depth)])
    if rule == "late":
        return list(range(depth - count, depth))
    if rule == "penultimate":
        return sorted([*range(depth - 2, -1, -1), depth - 1][:count])
    if rule == "angle":
        turns = np.array([angle[i, i + count] for i in range(depth - count + 1)])
        _check_measured(rule, np.all(np.isfinite(turns)))
        start = int(np.argmin(turns))
        return list(range(start, start + count))
    if rule == "drop":
        if damage is None:
            raise UserError("damage", None, "drop compares it: give what each block's removal adds to the loss")
        score = np.where(np.isfinite(damage), damage, np.inf)
        _check_measured(rule, np.any(np.isfinite(score)))
    else:
        score = np.array([1 - cosine[i, i + 1] for i in range(depth)])
        _check_measured(rule, np.all(np.isfinite(score)))
    return sorted(int(i) for i in np.argsort(score, kind="stable")[:count])


def _check_measured(rule: str, measured: bool) -> None:
    if not measured:
        raise UserError("rule", rule, "what it compares is not finite in this model: use late, or name the blocks")


def staying(depth: int, gone: Sequence[int]) -> list[int]:
    """The 0-based numbers of the blocks that stay. Raises UserError for a block that does not exist, and if none would
    stay."""
    stays = [block for block in range(depth) if block not in gone]
    if len(stays) + len({*gone}) != depth or not stays:
        fix = f"blocks are 1 to {depth}, and at least one has to stay"
        raise UserError("blocks", sorted(block + 1 for block in {*gone}), fix)
    return stays


def forward_options(run: OpenRun) -> dict:
    """The options of a forward pass in a measurement. The tokens of a routed model are chosen by its causal decider, as
    in the evaluations of its training; only if it has no thresholds yet, by top-k, which looks at later tokens."""
    model, cuts = run.model, run.mod.get("cuts")
    known = cuts is not None or not model.mod.decider.needs_cuts
    return {"progress": run.progress, "cuts": cuts, "causal": run.calibrated or (run.config.model.mod.active and known)}


def forward_without(
    model: Transformer, batch: Batch, stays: Bool[Array, " L"], **options
) -> tuple[Float[Array, "B T V"], Float[Array, "L+1 b T D"]]:
    """Logits of the model without some of its blocks, and, for some sequences (at most `ROWS`), the residual's
    direction before and after every block. A removed block passes the residual on; the others keep their place in
    depth."""
    leave_out, rows = without(stays), counted.most_counted(batch.counted, ROWS)
    direction = lambda stream: model.scheme.lanes(stream)[0][rows]  # noqa: E731

    def intervene(model: Transformer, stream, call: BlockCall):
        after, _ = leave_out(model, stream, call)
        return after, (direction(stream), direction(after))

    output = model(batch.tokens, batch.where, intervene=intervene, **options)
    before, after = output.seen
    return model.logits(output), jnp.concatenate([before[:1], after])


def cosines_and_angles(
    directions: Float[Array, "L+1 b T D"], weights: Float[Array, "b T"]
) -> tuple[Float[Array, "L+1 L+1"], Float[Array, "L+1 L+1"]]:
    """Cosine, and angle over pi, between the directions at all pairs of depths, as weighted sums over tokens."""

    def row(one: Float[Array, "b T D"]) -> tuple[Array, Array]:
        values = jnp.clip(cosine(one, directions), -1.0, 1.0), angles.angle(one, directions) / jnp.pi
        total = lambda value: jnp.sum(jnp.where(weights > 0, weights * value, 0.0), axis=(1, 2))  # noqa: E731
        return total(values[0]), total(values[1])

    return jax.lax.map(row, directions)


class Cutter:
    """An open run whose blocks can be left out. One compiled program serves all choices of blocks."""

    def __init__(self, run: OpenRun):
        graph, self.params = nnx.split(run.model)
        self.depth, self.data = run.config.model.depth, run.config.data
        options = forward_options(run)
        self._sums = jax.jit(functools.partial(_sums, graph, options))
        self._look = jax.jit(functools.partial(_look, graph, options))

    def stays(self, gone: Sequence[int]) -> Bool[np.ndarray, " L"]:
        """True for each block that stays. Raises UserError as `staying` does."""
        return np.isin(np.arange(self.depth), staying(self.depth, gone))

    def loss(self, batches: Sequence[Batch], gone: Sequence[int] = ()) -> float:
        """Mean loss over the counted targets, nats; `nagjax.measure.counted.scales` weights the corpora of a mixture.
        Raises UserError if no target counts."""
        nats, counts = self.batch_nats(batches, gone).T
        return float(counted.scales(self.data, batches, counts) @ nats / counts.sum())

    def batch_nats(self, batches: Sequence[Batch], gone: Sequence[int] = ()) -> Float[np.ndarray, "N 2"]:
        """Summed loss (nats) and number of counted targets of each batch."""
        stays = self.stays(gone)
        return np.array([self._sums(self.params, batch, stays) for batch in batches], np.float64)

    def measure(self, batches: Sequence[Batch]) -> tuple[Float[np.ndarray, "L+1 L+1"], Float[np.ndarray, "L+1 L+1"]]:
        """Mean cosines, and angles over pi, between the residuals before and after the blocks, weighted as in
        `loss`."""
        seen = [self._look(self.params, batch, self.stays(())) for batch in batches]
        cosine, angle, counts = (np.stack([np.asarray(own[i], np.float64) for own in seen]) for i in range(3))
        scales = counted.scales(self.data, batches, counts)
        cosine, angle = (np.tensordot(scales, sums, 1) / counts.sum() for sums in (cosine, angle))
        return cosine, angle

    def drops(self, batches: Sequence[Batch]) -> Float[np.ndarray, " L"]:
        """The increase of the loss when each block alone is left out, nats."""
        whole = self.loss(batches)
        return np.array([self.loss(batches, [block]) - whole for block in range(self.depth)])


def _sums(graph, options, params, batch: Batch, stays) -> tuple[Array, Array]:
    model = nnx.merge(graph, params)
    output: Output = model(batch.tokens, batch.where, intervene=without(stays), **options)
    _, sums = head_loss(model, output, batch)
    return sums.nats, sums.count


def _look(graph, options, params, batch: Batch, stays) -> tuple[Array, Array, Array]:
    _, directions = forward_without(nnx.merge(graph, params), batch, stays, **options)
    weights = batch.counted[counted.most_counted(batch.counted, ROWS)].astype(jnp.float32)
    return *cosines_and_angles(directions, weights), jnp.sum(weights)
