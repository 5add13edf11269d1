"""Cut blocks from trained models, with no fine-tuning: how much does the loss rise?

Claim: Plain pre-norm models barely notice losing late blocks; NAG and LayerNorm Scaling models do.
Source: Sun et al. 2025, arXiv:2502.05795 (LNS); Figliolia & Millidge 2026, arXiv:2606.16112 (NAG)
Expected: without the last quarter of its blocks plain loses little, NAG and LNS clearly more (no figures published)
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: 8 GPUs or a TPU slice
Time: smoke 15 s; cpu about 25 min with --processes 2; h200 and paper not measured
Command: python -m experiments.prune --processes 2

Three ways to choose the blocks: the deepest ones; those of least influence, 1 - cos(h_l, h_l+1) (ShortGPT); and the run
of neighbours over which the residual turns least, arccos cos(h_l, h_l+n) / pi (Gromov et al.). Scores are measured on a
first part of the validation batches, losses on the rest. A removed block passes the residual on unchanged; the blocks
that stay keep their place in depth (with LNS also their scale, unlike in arXiv:2502.05795, which is a confounder).
Models are compared at their schemes' default learning rates, untuned, which decides nothing.
"""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from experiments.harness.figures import look, panels, with_spread
from experiments.harness.jobs import Record, Training
from experiments.harness.one_shape import Settings, trainings
from experiments.harness.results import Summary
from experiments.harness.statistics import Interval, mean_interval
from experiments.harness.verdicts import Gap, ahead_of_all
from nagjax.errors import UserError
from nagjax.measure.cuts import Cutter, choose
from nagjax.runs.opening import open_run
from nagjax.train.evaluator import Evaluator

WAYS = ("late", "influence", "angle")
CUT = 0.25  # the share of the blocks the claim is judged at
PLAIN, OTHERS = "plain", ("nag", "lns")


SIZES = {
    "smoke": Settings(4, 16, 16, 8, 4, 1, ("nag",), 2),
    "cpu": Settings(24, 64, 128, 8, 300, 3),
    "h200": Settings(48, 512, 1024, 32, 2000, 1),
    "paper": Settings(64, 512, 1024, 64, 16_000, 5),
}


def plan(settings: Settings) -> list[Training]:
    if settings.eval_batches < 2:
        raise UserError("eval_batches", settings.eval_batches, "give at least 2: some score the blocks, others judge")
    return trainings(settings, cut_blocks)


def cut_blocks(folder: Path) -> dict:
    """Mean loss by way and number of blocks removed, and which went."""
    run = open_run(folder)
    depth = run.config.model.depth
    batches = list(Evaluator(run.blueprint).batches(run.config.train.eval_batches))
    scored = batches[: max(len(batches) // 3, 1)]
    judged = batches[len(scored) :]

    cutter = Cutter(run)
    cosine, angle = cutter.measure(scored)
    removed = sorted({round(depth * share) for share in (0, 1 / 16, 1 / 8, 1 / 4, 3 / 8, 1 / 2)})
    found = {way: [(n, choose(way, n, cosine, angle)) for n in removed] for way in WAYS}
    return {
        "cuts": {way: [[n, cutter.loss(judged, gone), gone] for n, gone in own] for way, own in found.items()},
        "influence": [round(float(1 - cosine[i, i + 1]), 6) for i in range(depth)],
    }


def damage(records: Sequence[Record], scheme: str, way: str, share: float) -> dict[int, float | None]:
    """By seed: what removing this share of the blocks adds to the loss; None: diverged."""
    found = {}
    for record in records:
        if record.labels["scheme"] != scheme:
            continue
        if record.metrics["loss"] is None:
            found[record.labels["seed"]] = None
            continue
        cuts = record.metrics["cuts"][way]
        most = max(n for n, _, _ in cuts) * 2
        at = min(cuts, key=lambda cut: abs(cut[0] - share * most))
        found[record.labels["seed"]] = at[1] - cuts[0][1]
    return found


def _mean(added: dict[int, float | None]) -> Interval:
    """Over the seeds that came through."""
    return mean_interval([value for value in added.values() if value is not None])


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    rows = []
    for scheme in settings.schemes:
        whole = [r.metrics["loss"] for r in records if r.labels["scheme"] == scheme and r.metrics["loss"] is not None]
        row = {"scheme": scheme, "loss": str(mean_interval(whole))}
        for way in WAYS:
            row[f"{way}, {CUT:.0%} cut"] = str(_mean(damage(records, scheme, way, CUT)))
        rows.append(row | {"late, 50% cut": _mean(damage(records, scheme, "late", 0.5)).estimate})
    late = {scheme: damage(records, scheme, "late", CUT) for scheme in settings.schemes}
    told = ", ".join(f"{scheme} +{_mean(own)}" for scheme, own in late.items())
    text = (
        f"loss added without the last {CUT:.0%} of the blocks: {told} nats per token (95% over {settings.seeds} seeds)"
    )
    gaps = [Gap.of(s, late[s], late[PLAIN]) for s in OTHERS if {s, PLAIN} <= late.keys()]
    text += f"; minus plain's, {', '.join(f'{gap.name} {gap}' for gap in gaps)}" if gaps else ""
    verdict = ahead_of_all(gaps) if len(gaps) == len(OTHERS) else "undecided"
    least = min((gap for gap in gaps if gap.values), key=lambda gap: gap.middle, default=None)
    head = f"{least.name} minus plain, loss added without a quarter: {least} nats" if least else ""
    return Summary(text, verdict, rows, headline=head)


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    figure, axes = panels(len(WAYS), "Loss against blocks kept, no fine-tuning")
    for ax, way in zip(axes, WAYS, strict=True):
        for scheme in settings.schemes:
            own = [r.metrics["cuts"][way] for r in records if r.labels["scheme"] == scheme and "cuts" in r.metrics]
            if own:
                kept = [settings.depth - n for n, _, _ in own[0]]
                added = [[cuts[i][1] - cuts[0][1] for cuts in own] for i in range(len(kept))]
                with_spread(ax, kept, added, **look(scheme), label=scheme)
        ax.invert_xaxis()
        ax.set_yscale("symlog", linthresh=0.1)
        ax.set_xlabel("blocks kept")
        ax.set_title({"late": "the deepest go", "influence": "least influence goes", "angle": "least turn goes"}[way])
    axes[0].set_ylabel("loss added (nats per token), logarithmic above 0.1")
    axes[0].legend(frameon=False)
    return figure


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
