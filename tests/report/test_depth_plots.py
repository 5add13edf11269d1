"""Figures in which one block costs far more than the others."""

import numpy as np
import pytest
from matplotlib.colors import to_hex

from nagjax.report.depth_plots import BLOCK, MARK, Line, Lines, _lines
from nagjax.report.style import REACH, drawing

KNEE = 0.01


@pytest.mark.parametrize("highest, scale", [(REACH * KNEE, "linear"), (2 * REACH * KNEE, "symlog")])
@pytest.mark.parametrize("bars", [True, False])
def test_the_axis_is_logarithmic_where_one_value_would_hide_the_others(highest, scale, bars):
    values = [0.5 * KNEE, -KNEE, None, 3 * KNEE, highest]
    with drawing():
        figure = _lines(Lines("title", "nats", [Line("", values, BLOCK)], bars=bars, knee=KNEE))
    (ax,) = figure.axes
    told = " ".join(text.get_text() for text in figure.texts)
    assert ax.get_yscale() == scale and ("logarithmic above 0.01" in told) == (scale == "symlog")
    low, high = ax.get_ylim()
    assert low <= -KNEE and high >= highest
    if scale == "symlog":
        shown = [tick for tick in ax.get_yticks() if low <= tick <= high]
        assert 0.0 in shown and KNEE in shown and len(shown) >= 4


@pytest.mark.parametrize("values", [[1.0, 1.001], [0.8, 1.5], [1e-3, 2.0], [1e-14, 1e9]])
def test_a_log_axis_has_a_few_round_ticks(values):
    """And is not blown up where all values are nearly the same."""
    with drawing():
        (ax,) = _lines(Lines("title", "", [Line("", values, BLOCK)], log=True)).axes
    low, high = ax.get_ylim()
    ticks = ax.get_yticks()
    assert low < values[0] and values[1] < high and high / low > 1.69 and 3 <= len(ticks) <= 12
    assert all(low <= tick <= high for tick in ticks) and ax.get_yscale() == "log"


def test_a_block_without_a_finite_loss_is_a_bar_to_the_top():
    with drawing():
        figure = _lines(Lines("title", "nats", [Line("", [0.1, None, 0.2], BLOCK)], bars=True, knee=KNEE))
    (ax,) = figure.axes
    bars = [bar for bar in ax.patches if np.isfinite(bar.get_height())]
    first, second, third = sorted(bars, key=lambda bar: bar.get_x())
    assert second.get_height() == ax.get_ylim()[1] > third.get_height() > first.get_height()
    assert to_hex(second.get_facecolor()) == MARK and to_hex(first.get_facecolor()) == BLOCK
