"""The pruning curves of several runs in one figure."""

from collections.abc import Sequence

from matplotlib.ticker import MaxNLocator

from nagjax.report.depth_figures import RULE_LOOKS
from nagjax.report.style import REACH, axis_with_knee, drawing, label_ends, new_figure, png
from nagjax.report.verdict_depth import RISE

NAMES = {"late": "deepest", "influence": "least influence", "angle": "least turn", "drop": "least damage"}


def curve_plot(curves: Sequence[tuple[str, dict]]) -> bytes:
    """PNG: a panel for each of one or two runs (name, `pruning_curve`), a line for each rule."""
    changes = [
        loss - curve["loss"] for _, curve in curves for points in curve["rules"].values() for _, loss, _ in points
    ]
    lowest, highest = min(changes, default=0.0), max(changes, default=0.0)
    far = highest > REACH * RISE
    subtitle = "nats per token on validation text, no retraining" + (f"; logarithmic above {RISE:g}" if far else "")
    with drawing():
        figure, axes = new_figure("Loss added without blocks", subtitle, len(curves))
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.6}
        for ax, (name, curve) in zip(axes, curves, strict=True):
            for rule, points in curve["rules"].items():
                color, marker = RULE_LOOKS[rule]
                added = [loss - curve["loss"] for _, loss, _ in points]
                ax.plot([n for n, _, _ in points], added, color=color, marker=marker, **edge)
            ax.set_title(f"{name} (loss {curve['loss']:.3f})")
            ax.set_xlabel(f"blocks left out, of {curve['depth']}")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if far:
            axis_with_knee(axes[0], RISE, lowest, highest)
        else:
            axes[0].set_ylim(min(-0.02 * highest, 1.04 * lowest), 1.04 * highest or 1.0)
        ends = [
            (points[-1][0], points[-1][1] - curves[-1][1]["loss"], NAMES[rule], RULE_LOOKS[rule][0])
            for rule, points in curves[-1][1]["rules"].items()
        ]
        label_ends(axes[-1], ends)
        return png(figure, dpi=110)
