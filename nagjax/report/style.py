"""One style for all figures: colours that colour-blind readers can tell apart, quiet axes, names at the ends of
lines."""

import contextlib
import functools
import io
import re
import warnings
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import matplotlib
import matplotlib.font_manager
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator
from matplotlib.transforms import offset_copy

from nagjax.console import note
from nagjax.report.labels import count, run_labels
from nagjax.runs.log import Run

MOST_TICKS = 10  # of a logarithmic axis
REACH = 30  # see `axis_with_knee`
_INK, _QUIET, _RULE = "#222222", "#666666", "#dddddd"

# Okabe and Ito's colours, and Tol's for further schemes.
_SCHEMES = {
    "plain": ("#4d4d4d", "o"),
    "nag": ("#d55e00", "s"),
    "review": ("#0072b2", "^"),
    "lns": ("#009e73", "D"),
    "rezero": ("#cc79a7", "v"),
    "rezero_prenorm": ("#332288", "P"),
    "highway": ("#56b4e9", "X"),
    "nag_harmonic": ("#e69f00", "d"),
}
_COLORS = (
    *("#cc6677", "#882255", "#999933", "#aa4499", "#117733", "#6699cc", "#661100"),
    *("#44aa99", "#b8860b", "#7b68ee", "#a0522d"),
)
_MARKERS = ("p", "<", ">", "h", "*", "d", "8", "v", "X")
_NAMED = (  # each of these has its own pair; any other name gets a pair by its letters
    *("block_attn_res", "completep", "deepnorm", "denseformer", "depth_scaled", "highway_convex", "hyper_connections"),
    *("keel", "layer_norm", "layer_scale", "mhc", "mix_ln", "ngpt", "oru", "parallel", "peri_ln", "post_ln", "prores"),
    *("reordered", "sandwich", "skip_init", "review_convex", "pre_ln", "scaled_start"),
    *("lns_scaled_start", "lns_on_branch", "lns_on_mlp", "lns_on_attention", "lns_before_norm", "lns_on_residual"),
    "post_layer_norm",
)
_SCRIPTS = (
    *("Noto Sans CJK JP", "Noto Sans CJK SC", "Source Han Sans", "WenQuanYi Micro Hei", "Hiragino Sans"),
    *("PingFang SC", "Microsoft YaHei", "Yu Gothic", "Malgun Gothic", "Arial Unicode MS"),
)
NO_GLYPH = r"Glyph \d+ "  # the beginning of matplotlib's warning
_WIDTH, _LEFT, _RIGHT = 8.2, 0.7, 6.9  # inches: the figure's width, and the left and right ends of its axes
_DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))

RC = {
    "font.family": "DejaVu Sans",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _QUIET,
    "axes.edgecolor": _RULE,
    "axes.linewidth": 1.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "grid.color": "#eeeeee",
    "xtick.color": _QUIET,
    "ytick.color": _QUIET,
    "xtick.direction": "out",
    "ytick.left": False,
    "ytick.minor.left": False,
    "lines.linewidth": 1.8,
    "lines.markersize": 4.5,
    "lines.solid_capstyle": "round",
    "savefig.dpi": 160,
}


@contextlib.contextmanager
def drawing() -> Iterator[None]:
    """A context in which figures are drawn in this style, off screen, whatever the user's own settings are.

    No text is parsed as mathematics, so that tokens and folder names may contain any characters; a log axis therefore
    needs a formatter that writes no mathematics. Characters that no font of this machine has are drawn as boxes; a note
    says so once.
    """
    # not in RC: recipes use that for log axes whose numbers matplotlib writes as mathematics
    own = {"text.parse_math": False, "backend": "agg", "font.family": [RC["font.family"], *_further_fonts()]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", NO_GLYPH)
        with matplotlib.rc_context({**matplotlib.rcParamsDefault, **RC, **own}):
            yield
    others = [one for one in caught if not re.match(NO_GLYPH, str(one.message))]
    for one in others:
        warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
    if len(others) < len(caught):
        note("some signs are drawn as boxes: no font here has them. One of Noto Sans CJK would")


@functools.cache
def _further_fonts() -> list[str]:
    """The fonts on this machine that have characters which the first font lacks."""
    here = {font.name for font in matplotlib.font_manager.fontManager.ttflist}
    return [name for name in _SCRIPTS if name in here]


def png(figure: Figure, dpi: float) -> bytes:
    """The figure as a PNG; the same figure gives the same bytes."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi, metadata={"Software": None})
    return buffer.getvalue()


@dataclass(frozen=True)
class Style:
    """A run's name and its look in figures."""

    label: str
    color: str
    marker: str
    linestyle: object

    def line(self, points: int) -> dict:
        """Keyword arguments for `Axes.plot`, with about twenty markers however many points there are."""
        return {
            "color": self.color,
            "linestyle": self.linestyle,
            "marker": self.marker,
            "markevery": max(1, round(points / 20)),
            "markeredgecolor": "white",
            "markeredgewidth": 0.6,
        }


def scheme_look(name: str) -> tuple[str, str]:
    """The colour and marker of a scheme, or of another arm of an experiment; they depend on its name alone and so are
    the same in every figure."""
    if name in _SCHEMES:
        return _SCHEMES[name]
    at = _NAMED.index(name) if name in _NAMED else zlib.crc32(name.encode())
    return _COLORS[at % len(_COLORS)], _MARKERS[at % len(_MARKERS)]


def run_styles(runs: Sequence[Run]) -> list[Style]:
    """A colour and marker per scheme, the same in every figure, and a dash pattern per repeat of a scheme.

    A name that is not a scheme of the library gets other ones if another run in this figure has its colour or marker.
    """
    looks: dict[str, tuple[str, str]] = {}
    known = {*_SCHEMES, *_NAMED}
    for name in sorted({run.scheme for run in runs}, key=lambda name: (name not in known, name)):
        looks[name] = scheme_look(name)
        taken = {part for other, look in looks.items() if other != name for part in look}
        free = [(c, m) for m in _MARKERS for c in _COLORS if c not in taken and m not in taken]
        if name not in known and taken & {*looks[name]} and free:
            looks[name] = free[0]
    seen: dict[str, int] = {}
    styles = []
    for run, label in zip(runs, run_labels(runs), strict=True):
        nth = seen[run.scheme] = seen.get(run.scheme, -1) + 1
        styles.append(Style(label, *looks[run.scheme], _DASHES[nth % len(_DASHES)]))
    return styles


def new_figure(title: str, subtitle: str, panels: int = 1) -> tuple[Figure, list[Axes]]:
    """An empty figure with one or two panels, a shared vertical axis, and room for names on the right."""
    figure = Figure(figsize=(_WIDTH, 4.4))
    axes = figure.subplots(1, panels, sharey=True, squeeze=False)[0]
    figure.subplots_adjust(left=0.085, right=0.84, top=0.80 if panels == 1 else 0.76, bottom=0.13, wspace=0.08)
    figure.text(0.004, 0.945, title, fontsize=13, fontweight="bold", va="center")
    figure.text(0.004, 0.88, subtitle, fontsize=9.5, color=_QUIET, va="center")
    return figure, list(axes)


def token_axis(ax: Axes, last: float) -> None:
    """Training tokens along the bottom, ending at the last of them."""
    ax.set_xlim(0, 1.01 * last)
    ax.set_xlabel("training tokens")
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))


def label_ends(ax: Axes, ends: Sequence[tuple[float, float, str, str]], gap: float = 0.062) -> None:
    """Writes each `(x, y, text, color)` to the right of the axes, with a thin line to (x, y).

    No two texts are closer than `gap`, a share of the axes' height. To be called when the limits are final, because it
    makes room on the right for the longest text. An end that is not finite is named at the bottom.
    """
    if not ends:
        return
    figure = ax.figure
    to_axes = ax.transData + ax.transAxes.inverted()
    heights = [float(np.clip(to_axes.transform((x, y))[1], 0, 1)) if np.isfinite(y) else 0 for x, y, *_ in ends]
    order = np.argsort(heights, kind="stable")
    placed = _spread([heights[i] for i in order], gap)
    beside = offset_copy(ax.transAxes, figure, x=16, units="points")
    texts = []
    for i, at in zip(order, placed, strict=True):
        x, y, text, color = ends[i]
        line = {"arrowstyle": "-", "color": color, "linewidth": 0.7, "shrinkA": 2, "shrinkB": 3}
        texts.append(
            ax.annotate(
                text,
                xy=(x, np.clip(y, *ax.get_ylim())) if np.isfinite(y) else (1, at),
                xycoords="data" if np.isfinite(y) else "axes fraction",
                xytext=(1, at),
                textcoords=beside,
                color=color,
                fontsize=9.5,
                fontweight="bold",
                va="center",
                annotation_clip=False,
                arrowprops=line if np.isfinite(y) else None,
            )
        )
    # the extent of an annotation would include its line
    widest = max(Text.get_window_extent(text).width for text in texts) / figure.dpi
    width = max(_WIDTH, _RIGHT + 16 / 72 + widest + 0.12)
    figure.set_figwidth(width)
    figure.subplots_adjust(left=_LEFT / width, right=_RIGHT / width)


def _spread(heights: Sequence[float], gap: float) -> list[float]:
    """Ascending heights moved as little as needed (least squares) to be at least `gap` apart."""
    # With y_i = h_i - i * gap this is isotonic regression: pool neighbours that are out of order.
    pools: list[list[float]] = []
    for i, height in enumerate(heights):
        pools.append([height - i * gap])
        while len(pools) > 1 and np.mean(pools[-2]) > np.mean(pools[-1]):
            last = pools.pop()
            pools[-1] += last
    level = [float(np.mean(pool)) for pool in pools for _ in pool]
    return [value + i * gap for i, value in enumerate(level)]


def log_axis(
    ax: Axes, low: float, high: float, write: Callable[[float], str] = lambda value: f"{value:g}", least: float = 1.0
) -> None:
    """A log axis over [low, high], widened to at least the factor `least`. Its ticks are round numbers, as many as the
    range needs."""
    ax.set_yscale("log")
    span = np.log(high / low)
    pad = max(0.04 * span, 0.02, (np.log(least) - span) / 2)
    low, high = low * np.exp(-pad), high * np.exp(pad)
    ax.set_ylim(low, high)
    decades = 10.0 ** np.arange(np.floor(np.log10(low)), np.ceil(np.log10(high)) + 1)
    for digits in ((1,), (1, 3), (1, 2, 5), (1, 1.5, 2, 3, 5, 7)):
        ticks = [t for t in np.outer(decades, digits).ravel() if low <= t <= high]
        if len(ticks) >= 4:
            break
    else:  # in a range this short, evenly spaced ticks look even
        ticks = [t for t in MaxNLocator(6).tick_values(low, high) if low <= t <= high]
    ax.yaxis.set_major_locator(FixedLocator(ticks[:: -(-len(ticks) // MOST_TICKS) or 1]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: write(float(f"{value:.3g}"))))


def axis_with_knee(ax: Axes, knee: float, low: float, high: float) -> None:
    """A vertical axis that is linear up to the height `knee` and logarithmic above it, for values that reach more than
    `REACH` times that height."""
    ax.set_yscale("symlog", linthresh=knee, linscale=0.6)
    ax.set_ylim(min(0.0, 1.2 * low), 1.4 * high)
    ticks = [0.0, *(step * 10.0**power for power in range(-9, 10) for step in (1, 3))]
    ax.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if tick == 0.0 or knee <= tick <= 1.4 * high]))
    ax.yaxis.set_minor_locator(NullLocator())
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
