"""Parts of figures that several recipes draw. A scheme looks the same in all figures (nagjax/report/style.py)."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness.statistics import mean_interval
from nagjax.report.style import scheme_look

SCHEMES = {"nag-1": "nag_harmonic", "scaled_start": "plain"}  # schemes of the library under another name
LENGTHS = ("-longer", "-shorter")  # ends of an arm's name: it has tokens of its own number
GREY = "#c8c8c8"
COLORS = (  # for arms that are not schemes
    *("#d55e00", "#4d4d4d", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#332288"),
    *("#117733", "#882255", "#999933", "#44aa99", "#aa4466", "#666666", "#6699cc", "#661100"),
)
MANY = 12  # number of means from which on one is allowed to lie outside the axis
FEWEST = 3  # least number of values for which a bar is drawn; an interval of two says nothing


def panels(count: int, title: str, height: float = 4.0) -> tuple[Figure, list[Axes]]:
    """An empty figure with panels side by side."""
    figure = Figure(figsize=(max(5.2 * count, 6.4), height), layout="constrained")
    figure.suptitle(title, x=0.01, ha="left", fontsize=12, fontweight="bold")
    return figure, list(figure.subplots(1, count, squeeze=False)[0])


def look(arm: str, named: bool = True) -> dict[str, Any]:
    """Colour, marker and drawing order of an arm; grey and behind the others unless it is named. An arm that is a
    scheme of the library under another name, or trained on more or fewer tokens, looks like that scheme."""
    for ending in LENGTHS:
        arm = arm.removesuffix(ending)
    color, marker = scheme_look(SCHEMES.get(arm, arm))
    front = {"color": color, "marker": marker, "zorder": 3}
    return front if named else {"color": GREY, "marker": marker, "zorder": 1, "linewidth": 1}


@dataclasses.dataclass(frozen=True)
class Line:
    """An arm along an axis: its values at every x, whether its rate is at the edge of the grid there, and how many runs
    diverged."""

    arm: str
    x: Sequence[float]
    values: Sequence[Sequence[float]]
    edges: Sequence[bool]
    diverged: Sequence[int]


def draw_lines(ax: Axes, lines: Sequence[Line], named: Sequence[str]) -> None:
    """Draws means as lines, and single values as dots. Markers: hollow: the rate is at the edge of the grid; x at the
    top: a run diverged, and no mean of the others is drawn; ^ at the top: the value is beyond the axis
    (`highest_shown`). Bars are Student's 95% intervals, and are cut off where the axis ends. If two named lines have
    the same colour, the second is dashed."""
    top, colors = highest_shown(lines), set()
    for line in sorted(lines, key=lambda line: line.arm in named):
        style = look(line.arm, line.arm in named)
        if line.arm in named:
            style |= {"linestyle": "--"} if style["color"] in colors else {}
            colors.add(style["color"])
        dots = _dots(line)
        ax.scatter(*dots, s=8, color=style["color"], alpha=0.5, zorder=2)
        at = _sound(line)
        means = [float(np.mean(line.values[i])) for i in at]
        ax.plot([line.x[i] for i in at], means, **style | {"marker": ""})
        if line.arm in named:
            ax.plot([], [], **style, label=line.arm)
        for i, mean in zip(at, means, strict=True):
            fill = "white" if line.edges[i] else style["color"]
            ax.plot(line.x[i], mean, **style | {"markerfacecolor": fill, "linestyle": ""})
        for x, value in zip(*dots, strict=True):
            if top is not None and value > top:
                ax.text(x, 0.92, "^", color=style["color"], transform=ax.get_xaxis_transform(), ha="center")
        for i, count in enumerate(line.diverged):
            if count:
                ax.text(line.x[i], 0.97, "x", color=style["color"], transform=ax.get_xaxis_transform(), ha="center")
    for line in lines:
        for i in _sound(line) if line.arm in named else ():
            if len(line.values[i]) >= FEWEST:
                bar = mean_interval(line.values[i])
                high = bar.high if top is None else min(bar.high, top)
                ax.plot([line.x[i]] * 2, [bar.low, high], color=look(line.arm)["color"], linewidth=1)
    if top is not None:
        ax.set_ylim(ax.get_ylim()[0], top)
    if any(line.arm in named for line in lines) and not any(other.get_legend() for other in ax.figure.axes):
        ax.legend(frameon=False, fontsize=8)


def highest_shown(lines: Sequence[Line]) -> float | None:
    """The end of the axis, if a value lies so far above most means that it would flatten them; else None."""
    means = [float(np.mean(line.values[i])) for line in lines for i in _sound(line)]
    if len(means) < MANY:
        return None
    low, first, third = np.quantile(means, [0.0, 0.25, 0.75])
    wall = third + 4 * (third - first)
    if all(value <= wall for line in lines for own in line.values for value in own):
        return None
    shown = max(mean for mean in means if mean <= wall)
    return float(shown + 0.1 * (shown - low))


def _sound(line: Line) -> list[int]:
    """Indices of the points of a line at which no run diverged."""
    return [i for i, own in enumerate(line.values) if len(own) and not line.diverged[i]]


def _dots(line: Line) -> tuple[list[float], list[float]]:
    """The x positions of all single values, and the values."""
    pairs = [(x, value) for x, own in zip(line.x, line.values, strict=True) for value in own]
    return [x for x, _ in pairs], [value for _, value in pairs]


def with_spread(ax: Axes, x: Sequence[float], values: Sequence[Sequence[float]], **style) -> None:
    """A line through the means, the 95% Student interval of each as a bar if it has three values or more, and single
    values as dots."""
    means = np.array([np.mean(own) for own in values])
    half = np.array([mean_interval(own).high - np.mean(own) if len(own) >= FEWEST else 0.0 for own in values])
    color = ax.errorbar(x, means, half, capsize=3, **{"marker": "o"} | style).lines[0].get_color()
    for at, own in zip(x, values, strict=True):
        ax.scatter([at] * len(own), own, s=9, color=color, alpha=0.5, zorder=3)
