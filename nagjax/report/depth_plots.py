"""The two kinds of figures over depth: lines over depth, and a matrix of depths by depths."""

from collections.abc import Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from nagjax.report.style import REACH, axis_with_knee, drawing, label_ends, log_axis, new_figure, png

ATTENTION, MLP, BLOCK, FIRST, MARK = "#0072b2", "#d55e00", "#4d4d4d", "#cc79a7", "#009e73"  # Okabe and Ito, and grey
QUIET = "#777777"


class Line(NamedTuple):
    """One curve; `x` are block numbers, 1, 2, ... if not given."""

    label: str
    y: Sequence[float | None]
    color: str
    marker: str = "o"
    x: Sequence[float] | None = None


class Lines(NamedTuple):
    """One panel with curves over depth. level: a reference height and its name. span: the smallest vertical range, so
    that rounding errors are not magnified. knee: if values reach more than `REACH` times this height, the vertical axis
    is linear only up to it, and logarithmic above. bars: draws bars from 0; a bar without a height reaches the top, in
    the colour `MARK`."""

    title: str
    subtitle: str
    lines: Sequence[Line]
    log: bool = False
    level: tuple[float, str] | None = None
    bottom: float | None = None
    span: float = 0.0
    xlabel: str = "block"
    bars: bool = False
    knee: float | None = None


class Grid(NamedTuple):
    """A matrix of depths, counted from 1: rows against columns, with the first row at the bottom; cells in `mask` stay
    white."""

    title: str
    subtitle: str
    values: np.ndarray
    bar: str
    x: str
    y: str
    log: bool = False
    top: float | None = None
    mask: np.ndarray | None = None


def draw(what: Lines | Grid) -> bytes:
    """The figure as a PNG; the same data give the same bytes."""
    with drawing():
        return png(_lines(what) if isinstance(what, Lines) else _grid(what), dpi=110)


def _lines(what: Lines) -> Figure:
    far = what.knee is not None and _highest(what) > REACH * what.knee
    figure, (ax,) = new_figure(what.title, what.subtitle + (f"; logarithmic above {what.knee:g}" if far else ""))
    ends, shown, unbounded = [], [], []
    for line in what.lines:
        y = np.array([np.nan if v is None or (what.log and v <= 0) else v for v in line.y], float)
        x = _places(line)
        shown.append(y[np.isfinite(y)])
        if what.bars:
            ax.bar(x, y, color=line.color, width=0.75)
            unbounded += [at for at, height in zip(x, y, strict=True) if np.isnan(height)]
            continue
        every = max(1, round(len(y) / 20))
        style = {"marker": line.marker, "markevery": every, "markeredgecolor": "white", "markeredgewidth": 0.6}
        ax.plot(x, y, color=line.color, **style)
        last = np.flatnonzero(np.isfinite(y))
        if last.size:
            ends.append((float(x[last[-1]]), float(y[last[-1]]), line.label, line.color))
    shown = np.concatenate(shown) if shown else np.array([1.0])
    if what.log and shown.size:
        log_axis(ax, float(shown.min()), float(shown.max()), least=1.7)
    elif what.knee is not None and far:
        axis_with_knee(ax, what.knee, float(shown.min()), float(shown.max()))
    elif what.bottom is not None:
        ax.set_ylim(bottom=min(what.bottom, shown.min(initial=0.0)))
    if not what.log and np.diff(ax.get_ylim())[0] < what.span:
        middle = float(np.mean(ax.get_ylim()))
        ax.set_ylim(middle - what.span / 2, middle + what.span / 2)
    bottom, top = ax.get_ylim()
    ax.bar(unbounded, top, color=MARK, width=0.75)
    ax.set_ylim(bottom, top)
    places = np.concatenate([_places(line) for line in what.lines])
    longest = np.max(places)
    ax.set_xlim(np.min(places) - 0.6, longest + 0.6)
    if what.level is not None:
        height, name = what.level
        ax.axhline(height, color=QUIET, linewidth=1.0, linestyle=(0, (4, 3)))
        ends.append((longest + 0.6, height, name, QUIET))
    ax.set_xlabel(what.xlabel)
    ax.xaxis.set_major_locator(MaxNLocator(10, integer=True))
    label_ends(ax, ends)
    return figure


def _highest(what: Lines) -> float:
    return max((float(y) for line in what.lines for y in line.y if y is not None and np.isfinite(y)), default=0.0)


def _places(line: Line) -> np.ndarray:
    return np.arange(1, len(line.y) + 1) if line.x is None else np.asarray(line.x, float)


def _grid(what: Grid) -> Figure:
    figure = Figure(figsize=(7.2, 6.2))
    ax = figure.add_axes((0.09, 0.09, 0.76, 0.76))
    figure.text(0.012, 0.955, what.title, fontsize=13, fontweight="bold", va="center")
    figure.text(0.012, 0.905, what.subtitle, fontsize=9.5, color=QUIET, va="center")
    values = np.ma.masked_invalid(np.asarray(what.values, float))
    rows, columns = values.shape
    if what.mask is not None:
        values = np.ma.masked_where(what.mask, values)
    if what.log:
        values = np.ma.masked_less_equal(values, 0.0)
    norm = matplotlib.colors.LogNorm if what.log else matplotlib.colors.Normalize
    low, high = float(values.min()), float(what.top or values.max())
    low = max(low, high / 1e4) if what.log else min(low, 0.0)
    colors = matplotlib.colormaps["viridis"].with_extremes(bad="#ffffff")
    drawn = ax.imshow(
        values,
        origin="lower",
        aspect="auto",
        interpolation="none",
        extent=(0.5, columns + 0.5, 0.5, rows + 0.5),
        cmap=colors,
        norm=norm(low, high if high > low else low + 1),
    )
    ax.grid(False)
    ax.set_xlabel(what.x)
    ax.set_ylabel(what.y)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(10, integer=True))
    color_bar(figure, drawn, (0.875, 0.09, 0.022, 0.76), what.bar, what.log)
    return figure


def color_bar(
    figure: Figure, drawn: AxesImage, place: tuple[float, float, float, float], label: str, log: bool
) -> None:
    """Draws the colour scale of a matrix; `place` is (left, bottom, width, height) as shares of the figure."""
    bar = figure.colorbar(drawn, cax=figure.add_axes(place))
    if log:
        bar.ax.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
        bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    bar.ax.yaxis.set_minor_locator(NullLocator())
    bar.set_label(label)
    bar.outline.set_visible(False)
