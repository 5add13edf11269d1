"""The pruning curves of several runs in one figure."""

from collections.abc import Sequence

import numpy as np
from matplotlib.ticker import MaxNLocator

from nagjax.report.depth_figures import RULE_LOOKS
from nagjax.report.style import REACH, axis_with_knee, drawing, label_ends, new_figure, png
from nagjax.report.verdict_depth import RISE

NAMES = {"late": "deepest", "penultimate": "deepest but last"}
NAMES |= {"influence": "least influence", "angle": "least turn", "drop": "least damage"}


def curve_plot(curves: Sequence[tuple[str, dict]]) -> bytes:
    """A PNG with one panel for each of one or two pairs (name of a run, its `pruning_curve`), and one line per rule;
    points that are not finite are left out."""
    every = [_added(curve, rule) for _, curve in curves for rule in curve["rules"]]
    changes = [float(value) for added in every for value in added[np.isfinite(added)]]
    lowest, highest = min(changes, default=0.0), max(changes, default=0.0)
    far = highest > REACH * RISE
    subtitle = "nats per token on validation text, no retraining" + (f"; logarithmic above {RISE:g}" if far else "")
    with drawing():
        figure, axes = new_figure("Loss added without blocks", subtitle, len(curves))
        edge = {"markeredgecolor": "white", "markeredgewidth": 0.6}
        for ax, (name, curve) in zip(axes, curves, strict=True):
            for rule, points in curve["rules"].items():
                color, marker = RULE_LOOKS[rule]
                ax.plot([n for n, _, _ in points], _added(curve, rule), color=color, marker=marker, **edge)
            ax.set_title(f"{name} (loss {curve['loss']:.3f})")
            ax.set_xlabel(f"blocks left out, of {curve['depth']}")
            ax.xaxis.set_major_locator(MaxNLocator(integer=True))
        if far:
            axis_with_knee(axes[0], RISE, lowest, highest)
        else:
            axes[0].set_ylim(min(-0.02 * highest, 1.04 * lowest), 1.04 * highest or 1.0)
        _, last = curves[-1]
        ends = [(*_end(last, rule), NAMES[rule], RULE_LOOKS[rule][0]) for rule in last["rules"]]
        label_ends(axes[-1], ends)
        return png(figure, dpi=110)


def _added(curve: dict, rule: str) -> np.ndarray:
    """The added loss at each point of a rule's curve; NaN if the loss is not finite."""
    losses = np.array([loss for _, loss, _ in curve["rules"][rule]], float) - curve["loss"]
    return np.where(np.isfinite(losses), losses, np.nan)


def _end(curve: dict, rule: str) -> tuple[float, float]:
    """The point where a rule's line ends; its height is NaN if there is no line."""
    points, added = curve["rules"][rule], _added(curve, rule)
    shown = np.flatnonzero(np.isfinite(added))
    at = int(shown[-1]) if shown.size else len(points) - 1
    return points[at][0], float(added[at])
