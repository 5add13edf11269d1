"""The figures of docs/looking_inside.md that show the models of this folder beside one another."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from nagjax.report.depth_plots import Line, Lines, color_bar, draw
from nagjax.report.labels import count
from nagjax.report.style import drawing, png, scheme_look
from nagjax.runs.log import Run


class Map(NamedTuple):
    """A matrix with its first row at the bottom, which spans `extent`: left, right, bottom, top."""

    name: str
    values: np.ndarray
    extent: tuple[float, float, float, float]


def lengths(runs: Mapping[str, Run]) -> bytes:
    """PNG: the residual's RMS over training and depth (Sun et al. 2025, arXiv:2502.05795, have its variance)."""
    maps = []
    for name, run in runs.items():
        log = run.depth_log
        shared = np.isin(log.step, run.evals.step) & (log.step > 0)
        extent = (0.0, float(run.evals.tokens[-1]), 1.0, log.log_norm.shape[1] / 2 + 0.5)
        maps.append(Map(name, np.exp(log.log_norm[shared]).T, extent))
    figure, axes = _maps("How long the residual is", "RMS in front of each sublayer, log scale", maps, "RMS", log=True)
    for ax in axes:
        ax.set_xlabel("training tokens")
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: count(value)))
    axes[0].set_ylabel("block")
    return png(figure, dpi=110)


def distances(records: Mapping[str, dict]) -> bytes:
    """PNG: mean angle between the residuals in front of any two blocks (Gromov et al. 2024, arXiv:2403.17887)."""
    degrees = {name: 180 * np.array(record["angular_distance"], float) for name, record in records.items()}
    maps = [Map(name, own, (0.5, len(own) + 0.5, 0.5, len(own) + 0.5)) for name, own in degrees.items()]
    subtitle = "mean angle between the residuals in front of any two blocks"
    figure, axes = _maps("How far apart depths are", subtitle, maps, "degrees")
    for ax in axes:
        ax.set_xlabel("in front of block")
    axes[0].set_ylabel("in front of block")
    return png(figure, dpi=110)


def jacobians(records: Mapping[str, dict]) -> bytes:
    """PNG: how far each block's Jacobian is from the identity."""
    lines = [
        Line(name, record["blocks"]["jacobian"], *scheme_look(record["scheme"])) for name, record in records.items()
    ]
    return draw(Lines("How far each block is from doing nothing", "||J - I||_F / sqrt(D), log scale", lines, log=True))


def _maps(title: str, subtitle: str, maps: Sequence[Map], bar: str, log: bool = False) -> tuple[Figure, list]:
    with drawing():
        width = 1.75 + 2.2 * len(maps)  # inches
        figure = Figure(figsize=(width, 3.5))
        axes = list(figure.subplots(1, len(maps), sharey=True, squeeze=False)[0])
        figure.subplots_adjust(left=0.65 / width, right=1 - 0.95 / width, top=0.73, bottom=0.16, wspace=0.1)
        figure.text(0.012, 0.94, title, fontsize=13, fontweight="bold", va="center")
        figure.text(0.012, 0.86, subtitle, fontsize=9.5, color="#666666", va="center")
        every = np.concatenate([own.values.ravel() for own in maps])
        scale = matplotlib.colors.LogNorm if log else matplotlib.colors.Normalize
        norm = scale(every.min() if log else 0.0, every.max())
        for ax, own in zip(axes, maps, strict=True):
            drawn = ax.imshow(own.values, origin="lower", aspect="auto", extent=own.extent, norm=norm, cmap="viridis")
            ax.set_title(own.name)
            ax.grid(False)
            ax.xaxis.set_major_locator(MaxNLocator(3))
            ax.yaxis.set_major_locator(MaxNLocator(6, integer=True))
        color_bar(figure, drawn, (1 - 0.8 / width, 0.16, 0.12 / width, 0.57), bar, log)
        return figure, axes
