"""The figure of a comparison: losses against depth or tokens, differences to the reference, and further measures."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.harness.figures import FEWEST, Line, draw_lines, highest_shown, look, panels
from experiments.harness.outcome import Outcome
from experiments.harness.settings import Shape, brief

if TYPE_CHECKING:
    from experiments.harness.comparison import Comparison

LABELLED = 6  # arms with a colour and a name; all others are grey


def figure_of(comparison: Comparison, outcome: Outcome) -> Figure:
    along = "tokens" if len({s.tokens for s in outcome.shapes}) > 1 else "depth"
    groups: dict[tuple, list[Shape]] = {}
    for shape in outcome.shapes:
        groups.setdefault((shape.width, shape.depth if along == "tokens" else shape.tokens), []).append(shape)
    named = labelled(comparison, outcome)
    profiles = comparison.profiles(outcome)
    lines = any(len(own) > 1 for own in groups.values())
    reference = comparison.claim.reference
    with_gaps = sum(len(own) > 1 for own in groups.values()) if reference in outcome.arms else 0
    count = len(groups) + with_gaps + len(profiles)
    figure, axes = panels(count, comparison.title, height=4.2 if lines else 2.2 + 0.24 * len(outcome.arms))
    axes = iter(axes)
    for own in groups.values():
        alone = len(own) == 1
        _ranked(next(axes), outcome, own[0], named) if alone else _losses(next(axes), outcome, own, along, named)
        if not alone and reference in outcome.arms:
            _gaps(next(axes), outcome, own, along, named, reference)
    for name, measured in profiles.items():
        _profile(next(axes), comparison, name, measured, outcome, named)
    return figure


def labelled(comparison: Comparison, outcome: Outcome) -> list[str]:
    """At most six: the judged arm, the reference, then those of lowest loss at the last shape."""
    first = [comparison.claim.judged, comparison.claim.reference]
    order = [*first, *outcome.order(outcome.shapes[-1])]
    return [arm for arm in dict.fromkeys(order) if arm in outcome.arms][:LABELLED]


def _at(shape: Shape, along: str) -> float:
    return shape.tokens if along == "tokens" else shape.depth


def _losses(ax: Axes, outcome: Outcome, shapes: list[Shape], along: str, named: list[str]) -> None:
    own = [
        Line(
            arm,
            [_at(shape, along) for shape in shapes],
            [[run["loss"] for run in outcome.sound(arm, shape)] for shape in shapes],
            [outcome.tried(arm, shape).edge for shape in shapes],
            [outcome.diverged(arm, shape) for shape in shapes],
        )
        for arm in outcome.arms
    ]
    draw_lines(ax, own, named)
    _axis(ax, outcome, shapes, along)
    _signs(ax, own)
    ax.set_ylabel("validation loss (nats per token)")


def _gaps(ax: Axes, outcome: Outcome, shapes: list[Shape], along: str, named: list[str], reference: str) -> None:
    own = []
    for arm in outcome.arms:
        if arm == reference:
            continue
        gaps = [outcome.gap(arm, reference, shape) for shape in shapes]
        values = [gap.finite if gap.values else [gap.hint] * math.isfinite(gap.hint) for gap in gaps]
        edges = [outcome.tried(arm, shape).edge for shape in shapes]
        own.append(Line(arm, [_at(s, along) for s in shapes], values, edges, [gap.won + gap.lost for gap in gaps]))
    draw_lines(ax, own, named)
    ax.axhline(0, color="#999999", linewidth=1)
    low, high = ax.get_ylim()
    room = 0.04 * (max(high, 0.0) - min(low, 0.0))
    ax.set_ylim(min(low, -room), max(high, room))
    _axis(ax, outcome, shapes, along)
    _signs(ax, own)
    ax.set_ylabel(f"loss minus {reference}'s (nats per token)\nabove 0: behind")


def _axis(ax: Axes, outcome: Outcome, shapes: list[Shape], along: str) -> None:
    ax.set_xscale("log", base=2)
    ticks = sorted({_at(shape, along) for shape in shapes})
    ax.set_xticks(ticks, [brief(tick) for tick in ticks])
    ax.minorticks_off()
    ax.set_xlabel("training tokens" if along == "tokens" else "blocks")
    if along == "tokens":
        ax.set_title(f"{shapes[0].depth} blocks")
    elif outcome.settings.match == "flops":
        ax.set_title(f"FLOPs of {outcome.arms[0]} with {brief(shapes[0].tokens)} tokens")
    else:
        ax.set_title(f"{brief(shapes[0].tokens)} tokens")


def _signs(ax: Axes, lines: list[Line]) -> None:
    """Explains the markers of `draw_lines` that occur in the panel."""
    edge, lost = (any(any(getattr(line, name)) for line in lines) for name in ("edges", "diverged"))
    beyond = highest_shown(lines) is not None
    bars = any(len(values) >= FEWEST for line in lines for values in line.values)
    told = ["bars: 95%"] * bars + ["hollow: rate at the grid's edge"] * edge + ["x: a run diverged, no mean"] * lost
    told += ["^: beyond the axis"] * beyond
    if told:
        ax.set_xlabel("\n".join([ax.get_xlabel(), *("; ".join(told[i : i + 2]) for i in range(0, len(told), 2))]))


def _ranked(ax: Axes, outcome: Outcome, shape: Shape, named: list[str]) -> None:
    order = outcome.order(shape)
    for place, arm in enumerate(order):
        losses = [run["loss"] for run in outcome.sound(arm, shape)]
        style = look(arm, arm in named)
        style |= {"markerfacecolor": "white" if outcome.tried(arm, shape).edge else style["color"]}
        if losses:
            ax.plot(np.mean(losses), place, linestyle="", **style)
            ax.scatter(losses, [place] * len(losses), s=9, color=style["color"], alpha=0.5)
        if len(losses) >= FEWEST:
            bar = outcome.loss(arm, shape)
            ax.plot([bar.low, bar.high], [place, place], color=style["color"], linewidth=1, zorder=1)
        if outcome.diverged(arm, shape) or not losses:
            ax.text(1.0, place, "x", color=style["color"], transform=ax.get_yaxis_transform(), va="center", ha="right")
    ax.set_yticks(range(len(order)), order)
    ax.invert_yaxis()
    ax.set_title(shape.name)
    ax.set_xlabel(
        "validation loss (nats per token), each arm's own 95% interval\nhollow: rate at the grid's edge; x: diverged"
    )


def _profile(ax: Axes, comparison: Comparison, name: str, measured: dict, outcome: Outcome, named: list[str]) -> None:
    last = outcome.shapes[-1].name
    for arm in sorted(outcome.arms, key=lambda arm: arm in named):
        values = measured.get(f"{last}-{arm}")
        if values:
            ax.plot(np.arange(len(values)), values, **look(arm, arm in named) | {"marker": ""})
    if comparison.measures[name].log:
        ax.set_yscale("log")
    else:
        ax.set_yscale("symlog", linthresh=0.01)
        ax.set_ylabel("logarithmic above 0.01")
    ax.set_xlabel(comparison.measures[name].along)
    ax.set_title(comparison.measures[name].label)
