"""The figures of a comparison: loss over training, the gap to plain, growth, and profiles over depth.

Each is drawn off screen on its own `Figure`; no global state of matplotlib is read or changed.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from nagjax.report.labels import count, factor, listing, number, signed
from nagjax.report.style import RC, Style, drawing, label_ends, log_axis, new_figure, png, run_styles, token_axis
from nagjax.report.verdict import one_text
from nagjax.runs.log import Run, last_quarter

EARLY = 0.2
"""Share of the longest run whose losses do not set the vertical range: they would flatten the rest."""


@dataclass(frozen=True)
class Plot:
    """One figure: its file stem, its caption, and the PNG."""

    name: str
    caption: str
    png: bytes

    def __repr__(self) -> str:
        return f"Plot({self.name}, {len(self.png) // 1000} kB: {self.caption})"

    def _repr_png_(self) -> bytes:
        return self.png


def draw_plots(
    runs: Sequence[Run], figures: Sequence[str] | None = None, *, dpi: int = RC["savefig.dpi"]
) -> list[Plot]:
    """Every figure (of those in `figures`, if given) for which the runs have data, in reading order. The same runs give
    the same bytes.

    dpi: dots per inch of the PNGs.
    """
    styles = run_styles(runs)
    plots = []
    with drawing():
        for name in FIGURES if figures is None else figures:
            drawn = FIGURES[name](runs, styles)
            if drawn is not None:
                figure, caption = drawn
                plots.append(Plot(name, caption, png(figure, dpi)))
    return plots


def smooth(values: Float[np.ndarray, "N"], reach: int) -> Float[np.ndarray, "N"]:
    """The mean of the finite values at most `reach` positions away; values that are not finite become NaN."""
    finite = np.isfinite(values)
    at = np.arange(values.size)
    first, last = np.maximum(at - reach, 0), np.minimum(at + reach + 1, values.size)
    total = np.append(0.0, np.cumsum(np.where(finite, values, 0.0)))
    weight = np.append(0, np.cumsum(finite))
    return np.where(finite, (total[last] - total[first]) / np.maximum(weight[last] - weight[first], 1), np.nan)


def _loss(runs: Sequence[Run], styles: Sequence[Style]) -> tuple[Figure, str] | None:
    late = [_late(run.evals.tokens, run.evals.loss, runs) for run in runs]
    late = np.concatenate([values[np.isfinite(values)] for values in late])
    if not late.size:
        return None
    apart = "" if one_text([run for run in runs if run.evals.step.size]) else " · other texts, other heights"
    figure, (ax,) = new_figure(
        "Loss over training", f"nats per token · points: validation, faint lines: training (smoothed){apart}"
    )
    trained = []
    for run, style in zip(runs, styles, strict=True):
        smoothed = smooth(run.train.loss, run.train.loss.size // 60)
        ax.plot(run.train.tokens, smoothed, color=style.color, alpha=0.3, linewidth=1.1)
        ax.plot(run.evals.tokens, run.evals.loss, **style.line(run.evals.step.size))
        trained.append(_late(run.train.tokens, smoothed, runs))
    trained = np.concatenate(trained)
    trained = trained[np.isfinite(trained)]
    low, high = min(late.min(), trained.min(initial=np.inf)), late.max()
    pad = 0.04 * (high - low) or 0.01 * high
    ax.set_ylim(low - pad, high + pad)
    token_axis(ax, max(run.tokens for run in runs))
    ends = [_end(run.evals.tokens, run.evals.loss) for run in runs]
    finals = [run.evals.loss[-1] if run.evals.step.size else None for run in runs]
    label_ends(
        ax,
        [
            (*end, f"{style.label} {number(final, 3)}", style.color)
            for end, final, style in zip(ends, finals, styles, strict=True)
        ],
    )
    return figure, (
        "Validation loss (points) and smoothed training loss (faint), in nats per token, against training "
        f"tokens. The first {EARLY:.0%} of training may lie above the axis."
    )


def _gap(runs: Sequence[Run], styles: Sequence[Style]) -> tuple[Figure, str] | None:
    base = next((i for i, run in enumerate(runs) if run.scheme == "plain"), None)
    if base is None:
        return None
    curves = []
    for i, (run, style) in enumerate(zip(runs, styles, strict=True)):
        tokens, here, there = np.intersect1d(run.evals.tokens, runs[base].evals.tokens, return_indices=True)
        gap = run.evals.loss[here] - runs[base].evals.loss[there]
        if i != base and np.isfinite(gap).sum() >= 2 and one_text([run, runs[base]]):
            curves.append((tokens, gap, style))
    if not curves:
        return None
    name = styles[base].label
    figure, (ax,) = new_figure(f"Validation loss minus that of {name}", "nats per token · below zero is better")
    ax.axhline(0, color=styles[base].color, linewidth=1.4)
    for tokens, gap, style in curves:
        ax.plot(tokens, gap, **style.line(gap.size))
    late = np.concatenate([_late(tokens, gap, runs) for tokens, gap, _ in curves])
    late = np.append(late[np.isfinite(late)], 0.0)
    pad = 0.06 * (late.max() - late.min()) or 0.01
    ax.set_ylim(late.min() - pad, late.max() + pad)
    last = max(run.tokens for run in runs)
    token_axis(ax, last)
    ends = [(*_end(tokens, gap), _gap_name(s, gap[-1]), s.color) for tokens, gap, s in curves]
    label_ends(ax, [(last, 0.0, name, styles[base].color), *ends])
    return figure, (
        f"Validation loss minus that of {name} after the same number of tokens, in nats per token. Below "
        f"zero is better than {name}."
    )


def _gap_name(style: Style, gap: float) -> str:
    return f"{style.label} {signed(gap, 3)}" if np.isfinite(gap) else style.label


def _growth(runs: Sequence[Run], styles: Sequence[Style]) -> tuple[Figure, str] | None:
    curves = [
        (np.exp(run.depth_log.log_norm[-1] - run.depth_log.log_norm[-1][2]), style)
        for run, style in zip(runs, styles, strict=True)
        if run.depth_log.step.size
    ]
    finite = np.concatenate([y[np.isfinite(y) & (y > 0)] for y, _ in curves] or [np.array([])])
    if not finite.size:
        return None
    figure, (ax,) = new_figure(
        "Growth of the residual stream through depth",
        "RMS of the stream, relative to its value after the first block · log scale",
    )
    for y, style in curves:
        ax.plot(np.arange(y.size), y, **style.line(y.size))
    log_axis(ax, finite.min(), finite.max(), lambda value: f"×{count(value)}")
    ax.set_xlabel("sublayers passed (attention and MLP alternate)")
    ax.xaxis.set_major_locator(MaxNLocator(integer=True))
    ax.set_xlim(0, 1.01 * max(y.size - 1 for y, _ in curves))
    label_ends(ax, [(y.size - 1, y[-1], f"{s.label} ×{factor(y[-1])}", s.color) for y, s in curves])
    return figure, (
        "RMS of the residual stream before each sublayer and after the last, relative to its value after the "
        "first block (geometric mean over tokens), on a log scale, at the end of each run."
    )


def _growth_over_training(runs: Sequence[Run], styles: Sequence[Style]) -> tuple[Figure, str] | None:
    curves = []
    for run, style in zip(runs, styles, strict=True):
        _, here, there = np.intersect1d(run.depth_log.step, run.evals.step, return_indices=True)
        growth = run.depth_log.growth[here]
        if np.isfinite(growth).sum() >= 2:
            curves.append((run.evals.tokens[there], growth, style))
    if not curves:
        return None
    figure, (ax,) = new_figure(
        "Growth of the residual stream over training",
        "RMS of the stream after the last block over that after the first · log scale",
    )
    for tokens, growth, style in curves:
        ax.plot(tokens, growth, **style.line(growth.size))
    finite = np.concatenate([y[np.isfinite(y)] for _, y, _ in curves])
    log_axis(ax, finite.min(), finite.max(), lambda value: f"×{count(value)}")
    token_axis(ax, max(tokens[-1] for tokens, _, _ in curves))
    ends = [(*_end(tokens, growth), style) for tokens, growth, style in curves]
    label_ends(ax, [(x, y, f"{style.label} ×{factor(y)}", style.color) for x, y, style in ends])
    return figure, (
        "RMS of the residual stream after the last block, relative to that after the first (geometric mean over "
        "tokens), on a log scale, at each evaluation."
    )


def _turn(runs: Sequence[Run], styles: Sequence[Style]) -> tuple[Figure, str] | None:
    curves = [
        (np.degrees(run.depth_log.turn[-1]), style)
        for run, style in zip(runs, styles, strict=True)
        if run.depth_log.step.size
    ]
    finite = np.concatenate([y[np.isfinite(y) & (y > 0)] for y, _ in curves] or [np.array([])])
    if not finite.size:
        return None
    equal = len({y.size for y, _ in curves}) == 1
    subtitle = "mean angle between stream before and after · degrees, log scale"
    subtitle += " · shaded: the last quarter" if equal else ""
    figure, axes = new_figure("How far each sublayer turns the stream", subtitle, panels=2)
    _two_panels(axes, curves)
    log_axis(axes[0], finite.min(), finite.max(), lambda value: f"{value:g}°")
    label_ends(axes[1], [(y.size // 2, y[-1], s.label, s.color) for y, s in curves])
    return figure, (
        "Mean angle in degrees by which each attention (left) and MLP (right) sublayer turns the residual "
        "stream, on a log scale."
        + (" Shaded: the last quarter of the depth, whose mean the table gives." if equal else "")
    )


def _gate(runs: Sequence[Run], styles: Sequence[Style]) -> tuple[Figure, str] | None:
    curves, without = [], []
    for run, style in zip(runs, styles, strict=True):
        if run.depth_log.step.size:
            gate = run.depth_log.gate[-1]
            gated = np.isfinite(gate).any() and not np.all(gate == 1)
            curves += [(gate, style)] if gated else []
            without += [] if gated else [style.label]
    if not curves:
        return None
    low, high = min(np.nanmin(gate) for gate, _ in curves), max(np.nanmax(gate) for gate, _ in curves)
    below = "below 0 the update is subtracted" if low < 0 else ""
    subtitle = "mean gate over tokens · 0 is closed, 1 is open" + (below and f", {below}")
    figure, axes = new_figure("How open the gates are", subtitle, panels=2)
    _two_panels(axes, curves)
    axes[0].set_ylim(min(0.0, 1.05 * low), max(1.0, 1.05 * high))
    if below:
        for ax in axes:
            ax.axhline(0, color=RC["text.color"], linewidth=0.8)
    label_ends(axes[1], [(y.size // 2, y[-1], s.label, s.color) for y, s in curves])
    ungated = f" No gate: {listing(without)}." if without else ""
    told = "Mean gate of each attention (left) and MLP (right) sublayer, at the end of each run"
    return figure, f"{told}{below and f'; {below}'}.{ungated}"


FIGURES: dict[str, Callable] = {
    "loss": _loss,
    "gap": _gap,
    "growth": _growth,
    "growth_over_training": _growth_over_training,
    "turn": _turn,
    "gate": _gate,
}


def _two_panels(axes: Sequence[Axes], curves: Sequence[tuple[np.ndarray, Style]]) -> None:
    """Draws attention sublayers on the left and MLP sublayers on the right, with blocks counted from 1."""
    deepest = max(y.size // 2 for y, _ in curves)
    for ax, kind, first in zip(axes, ("Attention", "MLP"), (0, 1), strict=True):
        for y, style in curves:
            ax.plot(np.arange(1, y.size // 2 + 1), y[first::2], **style.line(y.size // 2))
        if len({y.size for y, _ in curves}) == 1:
            before = 2 * deepest - last_quarter(2 * deepest) - first  # sublayers, from this panel's first on
            ax.axvspan(math.ceil(before / 2) + 0.5, deepest + 0.5, color="#f4f4f4", linewidth=0, zorder=0)
        ax.set_title(kind)
        ax.set_xlabel("block")
        ax.set_xlim(0.5, deepest + 0.5)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))


def _late(tokens: np.ndarray, values: np.ndarray, runs: Sequence[Run]) -> np.ndarray:
    """The values measured after the first `EARLY` of the longest run's tokens; all values if none were."""
    late = values[tokens >= EARLY * max(run.tokens for run in runs)]
    return late if np.isfinite(late).any() else values


def _end(x: np.ndarray, y: np.ndarray) -> tuple[float, float]:
    """The last finite point of a curve."""
    at = np.flatnonzero(np.isfinite(y))
    return (float(x[at[-1]]), float(y[at[-1]])) if at.size else (float("nan"), float("nan"))
