"""Groups of tokens by the angles through which a model's blocks turn them."""

from collections.abc import Sequence

import jax
import numpy as np
from jaxtyping import Bool, Float
from matplotlib.axes import Axes

from experiments.harness.jobs import Record
from experiments.harness.looks import rounded
from nagjax.measure.angles import angle
from nagjax.measure.clusters import clusters
from nagjax.measure.cuts import forward_options
from nagjax.measure.interventions import residual, through
from nagjax.runs.opening import OpenRun
from nagjax.train.loss import Batch

GROUPS = 2


def token_turns(run: OpenRun, batches: Sequence[Batch]) -> tuple[Float[np.ndarray, "N L"], Bool[np.ndarray, " N"]]:
    """The angle in radians by which every block turns every counted token [N, L], and which of these tokens are first
    in a document, or in a row that continues one."""
    options = forward_options(run)

    @jax.jit
    def look(params, batch: Batch):
        def intervene(model, stream, call):
            after = through(model, stream, call)
            return after, angle(residual(model.scheme, stream), residual(model.scheme, after))

        return run.blueprint.model(params)(batch.tokens, batch.where, intervene=intervene, **options).seen

    turns, first = [], []
    for batch in batches:
        counted = np.asarray(batch.weights) > 0
        turns.append(np.asarray(look(run.params, batch))[:, counted].T)
        first.append(np.asarray(batch.positions)[counted] == 0)
    return np.concatenate(turns), np.concatenate(first)


def grouped(run: OpenRun, batches: Sequence[Batch]) -> dict:
    """Two groups of the counted tokens, the larger one first: `shares` of the tokens; `centres` [2, L], radians;
    `first`, the share of each group that are first tokens; `of_first`, the share of the first tokens in each group;
    `explained`, the shares of the variance along two principal components; and `tokens`, the number of tokens."""
    turns, first = token_turns(run, batches)
    found = clusters(turns, GROUPS)
    own = [found.labels == group for group in range(GROUPS)]
    return {
        "tokens": len(turns),
        "shares": rounded(found.shares),
        "centres": rounded(found.centres),
        "first": rounded([np.mean(first[group]) for group in own]),
        "of_first": rounded([np.sum(first & group) / max(np.sum(first), 1) for group in own]),
        "explained": rounded(found.explained),
    }


def columns(records: Sequence[Record]) -> dict[str, str]:
    """Cells of a table: means over the records of one scheme and depth that have `groups`; empty if none has."""
    found = [record.metrics["groups"] for record in records if "groups" in record.metrics]
    mean = lambda name: np.mean([own[name] for own in found], axis=0) if found else ()  # noqa: E731
    return {
        "groups of tokens": _percent(mean("shares")),
        "first tokens in them": _percent(mean("of_first")),
        "along two components": _percent(mean("explained")),
    }


def _percent(shares) -> str:
    return " / ".join(f"{share:.0%}" if share > 0.01 else f"{share:.1%}" for share in shares)


def draw_groups(ax: Axes, records: Sequence[Record], **style) -> None:
    """Draws the mean turn (degrees) of both groups against depth, averaged over the records; the smaller group is
    dashed."""
    found = [record.metrics["groups"]["centres"] for record in records if "groups" in record.metrics]
    for centre, line in zip(np.degrees(np.mean(found, axis=0)) if found else (), ("-", "--"), strict=False):
        ax.plot((np.arange(len(centre)) + 0.5) / len(centre), centre, line, **style)
