"""Figures of adaptive depth: the token-by-sublayer map, and loss against executed FLOPs."""

import json
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.colors import Normalize
from matplotlib.figure import Figure

from nagjax.files import write_bytes, write_text
from nagjax.report.style import axis_with_knee, drawing, png
from nagjax.runs.names import MAP, MAP_DATA

SHOWN = 96  # tokens in one picture; more would be unreadable
SKIPPED = "#ffffff"


def depth_map(paths: dict, title: str, *, top: float | None = None, dpi: int = 150) -> bytes:
    """A PNG with a column for each of the first `SHOWN` tokens and a row per sublayer, the first at the bottom. Each
    cell is coloured by the angle by which the sublayer turned the token, up to `top` degrees (by default the 98th
    percentile of the angles drawn); cells that were skipped are white. Beside it is the share of all tokens that each
    sublayer ran, and above it the share of all pairs that were skipped."""
    with drawing():
        everywhere = paths["ran"]
        ran, degrees = everywhere[:, :SHOWN], paths["degrees"][:, :SHOWN]
        sublayers, tokens = ran.shape
        figure = Figure(
            figsize=(max(6.0, 1.9 + 0.115 * tokens), 1.5 + 0.085 * max(sublayers, 24)), layout="constrained"
        )
        picture, shares = figure.subplots(1, 2, sharey=True, width_ratios=(max(tokens, 24), 10))
        for axes in (picture, shares):
            axes.grid(False)
        colours = matplotlib.colormaps["viridis_r"].with_extremes(bad=SKIPPED)
        if top is None:
            top = float(np.percentile(degrees[ran], 98)) if ran.any() else 1.0
        drawn = picture.imshow(
            np.ma.masked_where(~ran, degrees),
            origin="lower",
            aspect="auto",
            interpolation="none",
            cmap=colours,
            norm=Normalize(0.0, max(top, 1e-6)),
            extent=(-0.5, tokens - 0.5, 0.5, sublayers + 0.5),
        )
        picture.set_xticks(range(tokens), [_shown(piece) for piece in paths["tokens"][:SHOWN]], fontsize=6)
        picture.tick_params(axis="x", length=0, pad=1, labelrotation=90 if _wide(paths["tokens"]) else 0)
        picture.set_ylabel("sublayer (odd: attention, even: MLP)")
        over = f"{title}\n{1 - everywhere.mean():.0%} of the (token, sublayer) pairs skipped (white)"
        over += f"; drawn: the first {SHOWN} of {everywhere.shape[1]} tokens" if everywhere.shape[1] > SHOWN else ""
        held = paths["given"] - everywhere.shape[1]
        over += f"; {held} more tokens of the text are beyond the context" if held else ""
        size, weight = (matplotlib.rcParams[f"axes.title{own}"] for own in ("size", "weight"))
        figure.suptitle(
            over, x=0.01, ha="left", fontsize=size, fontweight=weight
        )  # the title may be wider than the first axes
        bar = figure.colorbar(drawn, ax=shares, pad=0.02, extend="max")
        bar.set_label("turn (degrees)")
        levels = np.arange(1, sublayers + 1)
        for start, colour, kind in ((0, "#0072b2", "attention"), (1, "#d55e00", "MLP")):
            shares.barh(levels[start::2], everywhere.mean(axis=1)[start::2], height=0.9, color=colour, label=kind)
        shares.set_xlim(0, 1)
        shares.set_xticks((0, 1), ("0", "100%"))
        shares.set_xlabel("tokens that ran")
        shares.legend(fontsize=7, frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0))
        return png(figure, dpi)


def skip_curve_plot(curve: dict, *, dpi: int = 150) -> bytes:
    """A PNG of the loss that skipping adds against executed forward FLOPs, by angle and by the controls of
    `nagjax.measure.skip_curve.calibrate`."""
    with drawing():
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        points, dense = curve["points"], curve["dense"]
        curves = (
            ("by angle", "loss", "flops", "#d55e00", "s"),
            ("other tokens of the same sublayers", "tokens_loss", "flops", "#cc79a7", "D"),
            ("tokens at random", "random_loss", "flops", "#4d4d4d", "o"),
            ("blocks of least influence", "influence_loss", "influence_flops", "#009e73", "v"),
            ("the last blocks", "late_loss", "late_flops", "#0072b2", "^"),
        )
        added = lambda point, loss: point[loss] - dense["loss"]  # noqa: E731
        for label, loss, flops, colour, marker in curves:
            x = [point[flops] / dense["flops"] for point in points]
            axes.plot(x, [added(point, loss) for point in points], color=colour, marker=marker, label=label)
        for point in points:
            if point["rate"] == curve["chosen"]:
                place = point["flops"] / dense["flops"], added(point, "loss")
                how = {"textcoords": "offset points", "ha": "center", "fontsize": 8}
                axes.annotate(f"chosen: {point['rate']:g}", place, (0, 8), **how)
        costs = [added(point, loss) for point in points for _, loss, *_ in curves]
        axis_with_knee(axes, 0.01, min(costs), max(costs))  # skipping a little may lower the loss
        axes.set_xlabel(f"executed forward FLOPs, share of the dense model's, whose loss is {dense['loss']:.3f}")
        axes.set_title("What skipping adds to the validation loss")
        axes.set_ylabel("nats per token, logarithmic above 0.01")
        axes.legend(frameon=False)
        return png(figure, dpi)


def write_map(paths: dict, folder: Path, title: str) -> Path:
    """Writes map.png and map.json into the folder, which is created if needed, and returns the picture's path."""
    folder.mkdir(parents=True, exist_ok=True)
    write_bytes(folder / MAP, depth_map(paths, title))
    content = {"tokens": paths["tokens"], "ran": paths["ran"].astype(int).tolist()}
    content["degrees"] = np.round(paths["degrees"], 3).tolist()
    write_text(folder / MAP_DATA, json.dumps(content))
    return folder / MAP


def _shown(piece: str) -> str:
    return {" ": "␣", "\n": "↵", "\t": "→"}.get(piece, piece.strip() or "␣")


def _wide(pieces: list[str]) -> bool:
    return any(len(piece.strip()) > 1 for piece in pieces[:SHOWN])
