"""A figure's axis shows what most arms do, and says what lies beyond it."""

import pytest
from matplotlib.figure import Figure

from experiments.harness.figures import MANY, Line, draw_lines, highest_shown, look


def lines(*losses, diverged=0):
    return [Line(f"arm{i}", [64], [[loss]], [False], [diverged]) for i, loss in enumerate(losses)]


CLOSE = [2.5 + 0.01 * i for i in range(MANY)]


@pytest.mark.parametrize(
    ("losses", "top"),
    [(CLOSE, None), ([*CLOSE, 9.0], CLOSE[-1] + 0.1 * (CLOSE[-1] - CLOSE[0])), ([*CLOSE[:4], 9.0], None)],
)
def test_the_axis_ends_where_one_value_would_press_the_rest_together(losses, top):
    shown = highest_shown(lines(*losses))
    assert shown == (top if top is None else pytest.approx(top))


def test_what_lies_beyond_the_axis_is_marked():
    ax = Figure().subplots()
    draw_lines(ax, [*lines(*CLOSE), *lines(9.0, diverged=1)], [])
    assert ax.get_ylim()[1] < 3.0
    assert sorted(text.get_text() for text in ax.texts) == ["^", "x"]


def test_bars_are_whole_where_the_axis_goes_on():
    """Also where the interval is wider than the dots; only what is above a top that was set ends there."""
    ax = Figure().subplots()
    three = Line("plain", [64], [[2.0, 2.1, 2.2]], [False], [0])
    draw_lines(ax, [three], ["plain"])
    bar, (low, high) = ax.lines[-1].get_ydata(), ax.get_ylim()
    assert bar[0] < 1.9 and bar[1] > 2.3 and low < bar[0] and bar[1] < high


def test_a_scheme_looks_the_same_whatever_number_of_tokens_it_trains_on():
    for arm in ("nag-1", "nag-1-longer", "nag-1-shorter"):
        assert look(arm) == look("nag_harmonic") != look("nag")


def test_named_lines_of_one_colour_differ_in_their_dashes():
    ax = Figure().subplots()
    named = ["layer_scale", "skip_init", "plain"]
    draw_lines(ax, [Line(arm, [8, 16], [[2.5], [2.6]], [False] * 2, [0] * 2) for arm in named], named)
    looks = {
        line.get_label(): (line.get_color(), line.get_linestyle()) for line in ax.lines if line.get_label() in named
    }
    assert len(set(looks.values())) == len({color for color, _ in looks.values()}) + 1 == 3
