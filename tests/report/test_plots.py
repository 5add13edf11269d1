import io
import warnings

import matplotlib
import numpy as np
import pytest
from matplotlib.colors import to_rgb
from PIL import Image

from nagjax.report import curve_plot, plots, style
from nagjax.report.plots import draw_plots, smooth
from nagjax.report.style import _NAMED, _SCHEMES, _spread, drawing, label_ends, new_figure, run_styles
from nagjax.residual.registry import own_schemes
from nagjax.runs.log import load_run
from tests.run_folders import SUBLAYERS, depth_line, eval_line, final_lines, train_line, write_run

NAMES = ["loss", "gap", "growth", "growth_over_training", "turn", "gate"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    steep = final_lines(1.81, growth_per_sublayer=0.5)
    return [
        load_run(write_run(folder / "p", steep, scheme="plain")),
        load_run(write_run(folder / "n", final_lines(1.79), scheme="nag")),
    ]


@pytest.fixture(scope="module")
def drawn(runs):
    return draw_plots(runs)


def shows(png: bytes, color: str) -> bool:
    """Whether the picture has pixels of exactly that colour."""
    pixels = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    return bool((np.abs(pixels - np.round(255 * np.array(to_rgb(color)))).max(axis=-1) <= 1).any())


def test_every_figure_is_drawn_with_every_run(runs, drawn):
    assert [plot.name for plot in drawn] == NAMES
    for plot in drawn:
        image = Image.open(io.BytesIO(plot.png))
        assert image.format == "PNG" and image.width >= 1200
        assert all(shows(plot.png, style.color) for style in run_styles(runs)), plot.name


def test_the_same_runs_give_the_same_bytes_and_leave_no_trace(runs, drawn):
    before = dict(matplotlib.rcParams)
    assert [plot.png for plot in draw_plots(runs)] == [plot.png for plot in drawn]
    assert dict(matplotlib.rcParams) == before


def test_what_was_not_measured_is_not_drawn(make_run):
    lines = [train_line(1, 3.0), eval_line(1, 3.0)]
    assert [p.name for p in draw_plots([load_run(make_run("a", lines))])] == ["loss"]
    ungated = {**depth_line(1), "gate": [1.0] * SUBLAYERS}
    plain = load_run(make_run("b", [ungated], scheme="plain"))
    assert [p.name for p in draw_plots([plain])] == ["growth", "turn"]
    gated = load_run(make_run("c", [depth_line(1)]))
    assert "No gate: plain pre-norm." in draw_plots([plain, gated])[-1].caption


@pytest.mark.filterwarnings("error")
def test_uneven_and_broken_runs_are_drawn(make_run):
    nan = float("nan")
    broken = depth_line(5)
    broken["log_norm"][3:] = [nan] * (SUBLAYERS - 2)
    broken["turn"] = [None] * SUBLAYERS
    runs = [
        load_run(make_run("p", final_lines(1.8, steps=40), scheme="plain")),
        load_run(make_run("n", [*final_lines(1.8), train_line(11, nan), eval_line(11, nan)], scheme="nag")),
        load_run(make_run("x", [train_line(1, None), eval_line(1, nan), broken], scheme="elsewhere")),
        load_run(make_run("y", [], scheme="lns")),
    ]
    assert [p.name for p in draw_plots(runs)] == NAMES


def test_growth_over_training_is_told_where_two_evaluations_measured_it(make_run):
    """From the first block to the last: a factor of exp(0.1 (S - 2)), then of exp(0.3 (S - 2))."""
    lines = [eval_line(5, 2.0), depth_line(5), eval_line(9, 1.9), depth_line(9, growth_per_sublayer=0.3)]
    both = draw_plots([load_run(make_run("a", lines))], ["growth_over_training"])
    later = draw_plots([load_run(make_run("b", [*lines[:3], lines[1] | {"step": 9}]))], ["growth_over_training"])
    assert both and later and both[0].png != later[0].png
    assert not draw_plots([load_run(make_run("c", lines[:2]))], ["growth_over_training"])
    assert not draw_plots([load_run(make_run("d", [lines[1], lines[3]]))], ["growth_over_training"])


def test_the_gap_is_between_runs_of_one_text(runs, make_run):
    other = load_run(make_run("t", final_lines(4.0), data={"tokenizer": "tok.json"}))
    assert "gap" not in [plot.name for plot in draw_plots([runs[0], other])]


def test_the_last_quarter_is_shaded_where_all_depths_are_one(runs, make_run):
    lines = [{**depth_line(1), "turn": [0.1] * 4, "log_norm": [0.1] * 5}]
    lines = [line | {name: [0.1] * 4 for name in ("ratio", "gate", "closed")} for line in lines]
    short = load_run(make_run("s", lines, depth=2))
    told = [draw_plots(own, ["turn"])[0].caption for own in (runs, [*runs, short])]
    assert ["Shaded" in caption for caption in told] == [True, False]


def test_a_figure_is_as_wide_as_its_names_need():
    """Not wider where a line ends at the left: its hair line is no text."""
    widths = []
    for end in (1.0, 0.0):
        with drawing():
            figure, (ax,) = new_figure("title", "nats")
            ax.set_xlim(0, 1)
            label_ends(ax, [(1.0, 0.2, "plain", "#000000"), (end, 0.8, "nag", "#000000")])
            widths.append(figure.get_figwidth())
    assert widths[0] == widths[1]


def test_signs_that_no_font_has_are_told_in_a_line(monkeypatch, capsys):
    monkeypatch.setattr(style, "_further_fonts", list)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with drawing():
            figure, _ = new_figure("日本語", "nats")
            plots.png(figure, 50)
    assert capsys.readouterr().err.count("\n") == 1
    with pytest.warns(UserWarning, match="another"), drawing():
        warnings.warn("another", UserWarning, stacklevel=1)
    assert not capsys.readouterr().err


def test_smoothing_is_a_centred_mean_of_what_is_finite():
    values = np.array([1.0, 2.0, 6.0, np.nan, 4.0])
    np.testing.assert_allclose(smooth(values, 1), [1.5, 3.0, 4.0, np.nan, 4.0])
    np.testing.assert_allclose(smooth(values, 0), values)
    assert smooth(np.array([]), 3).size == 0
    np.testing.assert_array_equal(smooth(np.array([2.0]), 9), [2.0])


def test_colours_belong_to_schemes_not_to_order(make_run):
    names = ["plain", "nag", "review", "lns", "alpha", "beta"]
    runs = [load_run(make_run(name, [], scheme=name)) for name in names]
    there = {s.label: s for s in run_styles(runs)}
    back = {s.label: s for s in run_styles(runs[::-1])}
    assert there == back
    assert len({(s.color, s.marker) for s in there.values()}) == len(names)


def test_every_scheme_of_the_library_has_a_look_of_its_own():
    own = own_schemes()
    assert "nag" in own and own.keys() <= {*_SCHEMES, *_NAMED}


def test_repeats_of_a_scheme_differ_by_dashes(make_run):
    a, b = run_styles([load_run(make_run(name, [], scheme="nag")) for name in "ab"])
    assert a.color == b.color and a.linestyle != b.linestyle


@pytest.mark.parametrize(
    ("heights", "placed"),
    [
        ([0.0, 0.5, 1.0], [0.0, 0.5, 1.0]),
        ([0.5, 0.5], [0.45, 0.55]),
        ([0.2, 0.2, 0.2, 0.9], [0.1, 0.2, 0.3, 0.9]),
        ([0.5, 0.55, 0.62], [0.4567, 0.5567, 0.6567]),
    ],
)
def test_labels_move_apart_as_little_as_needed(heights, placed):
    np.testing.assert_allclose(_spread(heights, 0.1), placed, atol=1e-4)


def test_removals_that_lower_the_loss_are_inside_the_figure(monkeypatch):
    drawn = []
    monkeypatch.setattr(curve_plot, "png", lambda figure, **_: drawn.append(figure) or b"")
    curve = {"loss": 3.0, "depth": 4, "rules": {"late": [[0, 3.0, []], [1, 2.98, [3]], [2, 3.01, [2, 3]]]}}
    curve_plot.curve_plot([("one", curve)])
    low, high = drawn[0].axes[0].get_ylim()
    assert low < -0.02 and high > 0.01


def test_gates_below_zero_are_inside_the_figure(make_run, monkeypatch):
    drawn = []
    monkeypatch.setattr(plots, "png", lambda figure, _: drawn.append(figure) or b"")
    gates = [[0.5] * SUBLAYERS, [0.5, -0.4] * (SUBLAYERS // 2)]
    runs = [load_run(make_run(name, [depth_line(1) | {"gate": gate}])) for name, gate in zip("ab", gates, strict=True)]
    above, below = (draw_plots([run], ["gate"])[0].caption for run in runs)
    limits = [figure.axes[0].get_ylim() for figure in drawn]
    assert limits[0] == (0, 1) and limits[1][0] < -0.4
    assert "subtracted" not in above and "below 0 the update is subtracted" in below
    assert any("subtracted" in text.get_text() for text in drawn[1].texts)
    level = [[line for line in ax.lines if not np.any(line.get_ydata())] for ax in drawn[1].axes]
    assert list(map(len, level)) == [1, 1]
