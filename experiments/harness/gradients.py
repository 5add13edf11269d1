"""Review Residuals in convex form, and gradient norms that show whether the first blocks still learn."""

import dataclasses
from pathlib import Path
from typing import ClassVar

import jax
import optax

from nagjax.residual import register
from nagjax.residual.prenorm import PreNormStream
from nagjax.residual.schemes.review import Review
from nagjax.runs.opening import open_run
from nagjax.train.evaluator import Evaluator
from nagjax.train.head_loss import head_loss


@register
@dataclasses.dataclass(frozen=True)
class ReviewConvex(Review):
    """`h <- (1 - r) * h + r * u` with the gate of Review Residuals."""

    name: ClassVar[str] = "review_convex"
    title: ClassVar[str] = "Review (convex)"

    def advance(self, stream: PreNormStream, update, at):
        after, gate = super().advance(stream, update, at)
        hidden = (after.hidden - gate * stream.hidden).astype(after.hidden.dtype)
        return PreNormStream(hidden, self.normalise(hidden, at)), gate


def gradients(folder: Path) -> dict:
    """Gradient norms of the branches of the first and the last block, at the initial and at the trained parameters."""
    run = open_run(folder)
    batch = next(iter(Evaluator(run.blueprint).batches(1)))

    @jax.jit
    def norms(params):
        def mean_loss(params):
            model = run.blueprint.model(params)
            nats, sums = head_loss(model, model(batch.tokens, batch.where, progress=1.0), batch)
            return nats / sums.count

        blocks = jax.grad(mean_loss)(params)["blocks"]
        branches = [blocks[kind]["branch"] for kind in ("attention", "mlp")]
        return [optax.tree.norm(jax.tree.map(lambda leaf, i=i: leaf[i], branches)) for i in (0, -1)]

    found = {}
    for when, params in (("start", run.blueprint.create_params()), ("end", run.params)):
        first, last = (float(norm) for norm in norms(params))
        found |= {f"first_gradient_{when}": first, f"last_gradient_{when}": last}
    return found
