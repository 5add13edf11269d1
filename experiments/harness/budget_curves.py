"""Validation loss on the way against what was spent: training FLOPs, and measured time."""

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness.figures import look, panels
from experiments.harness.outcome import Outcome
from experiments.harness.settings import Shape
from experiments.harness.statistics import mean_interval

SPENT = {  # by axis: of one run's metrics, per training token
    "training FLOPs": lambda run, shape: run["train_flops_per_token"],
    "training time (s)": lambda run, shape: run["step_seconds"] / (shape.batch * shape.context),
}


def figure_of_budgets(outcome: Outcome, arms: Sequence[str], title: str) -> Figure:
    """Means over the fresh seeds of the last shape, with 95% Student intervals. All points of an arm lie on one
    learning-rate schedule, so arms compare at equal shares of the budget, in the end above all."""
    figure, axes = panels(len(SPENT), title)
    for ax, name in zip(axes, SPENT, strict=True):
        for arm in arms:
            _curve(ax, outcome, arm, outcome.shapes[-1], name)
        ax.set(xlabel=name, ylabel="validation loss (nats per token)", xscale="log")
    axes[0].legend(frameon=False, fontsize=8)
    return figure


def _curve(ax: Axes, outcome: Outcome, arm: str, shape: Shape, spent: str) -> None:
    runs = outcome.sound(arm, shape)
    if not runs:
        return
    tokens = [at for at, _ in runs[0]["curve"]]
    per_token = float(np.mean([SPENT[spent](run, shape) for run in runs]))
    intervals = [mean_interval(losses) for losses in zip(*(_losses(run) for run in runs), strict=True)]
    x, style = per_token * np.array(tokens), look(arm)
    ax.plot(x, [own.estimate for own in intervals], **style, label=arm, markersize=4)
    if len(runs) > 1:
        low, high = ([getattr(own, side) for own in intervals] for side in ("low", "high"))
        ax.fill_between(x, low, high, color=style["color"], alpha=0.15, linewidth=0)


def _losses(run: dict) -> list[float]:
    return [loss for _, loss in run["curve"]]
