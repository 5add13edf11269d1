"""Validation loss during training against what was spent: training FLOPs, and measured time."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from experiments.harness.figures import look, panels
from experiments.harness.outcome import Outcome
from experiments.harness.statistics import mean_interval


def figure_of_budgets(outcome: Outcome, step_seconds: Mapping[str, float], title: str) -> Figure:
    """The curves of the arms in `step_seconds` (seconds per step, measured side by side): means over the fresh seeds of
    the last shape, with 95% Student intervals. All points of an arm lie on one learning-rate schedule, so arms are
    comparable at equal shares of the budget, above all at its end."""
    figure, axes = panels(2, title)
    shape = outcome.shapes[-1]
    tokens = shape.batch * shape.context
    for arm, seconds in step_seconds.items():
        if runs := outcome.sound(arm, shape):
            _curve(axes[0], arm, runs, float(np.mean([run["train_flops_per_token"] for run in runs])))
            _curve(axes[1], arm, runs, seconds / tokens)
    for ax, spent in zip(axes, ("training FLOPs", "training time (s)"), strict=True):
        ax.set(xlabel=spent, ylabel="validation loss (nats per token)", xscale="log")
        ax.xaxis.set_minor_formatter(NullFormatter())
    axes[1].xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes[1].xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def _curve(ax: Axes, arm: str, runs: Sequence[dict], per_token: float) -> None:
    curves = [[point for point in run["curve"] if point[0]] for run in runs]  # at 0 tokens nothing was spent
    intervals = [mean_interval([loss for _, loss in points]) for points in zip(*curves, strict=True)]
    x, style = per_token * np.array([at for at, _ in curves[0]]), look(arm)
    ax.plot(x, [own.estimate for own in intervals], **style, label=arm, markersize=4)
    if len(runs) > 1:
        low, high = ([getattr(own, side) for own in intervals] for side in ("low", "high"))
        ax.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)
