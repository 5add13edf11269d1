"""What is written in the map of tokens and sublayers."""

import numpy as np

from nagjax.report import maps


def figures_of(monkeypatch):
    """A list that the figures come into that are drawn from now on."""
    figures, png = [], maps.png
    monkeypatch.setattr(maps, "png", lambda figure, dpi: figures.append(figure) or png(figure, dpi))
    return figures


def drawn(monkeypatch, tokens, ran, given=None):
    """The figure of these tokens through two sublayers."""
    figures = figures_of(monkeypatch)
    paths = {"tokens": tokens, "given": given or len(tokens), "ran": ran, "degrees": np.where(ran, 10.0, 0.0)}
    assert maps.depth_map(paths, "title").startswith(b"\x89PNG")
    return figures[0]


def test_tokens_of_dollar_signs_are_no_mathematics(monkeypatch):
    tokens = ["a", "$$", "$\\frac$", "b"]
    labels = drawn(monkeypatch, tokens, np.ones((2, 4), bool)).axes[0].get_xticklabels()
    assert [label.get_text() for label in labels] == tokens


def test_the_share_skipped_is_that_of_all_tokens(monkeypatch):
    """Nobody skips among the tokens that are drawn, and everybody behind them skips the second sublayer."""
    ran = np.ones((2, 4 * maps.SHOWN), bool)
    ran[1, maps.SHOWN :] = False
    figure = drawn(monkeypatch, ["a"] * ran.shape[1], ran)
    assert "38% of the (token, sublayer) pairs skipped (white); drawn: the first 96 of 384 tokens" in (
        figure.get_suptitle()
    )
    assert [bar.get_width() for bar in figure.axes[1].patches] == [1.0, 0.25]
    short = drawn(monkeypatch, ["a"] * 4, ran[:, -4:])
    assert short.get_suptitle().endswith("50% of the (token, sublayer) pairs skipped (white)")


def test_what_the_context_does_not_hold_is_told(monkeypatch):
    title = drawn(monkeypatch, ["a"] * 4, np.ones((2, 4), bool), given=10).get_suptitle()
    assert title.endswith("; 6 more tokens of the text are beyond the context")


def test_the_numbers_at_a_skip_curve_are_no_mathematics(monkeypatch):
    """Skipping may lower the loss: nothing lies outside of the figure."""
    ways = [f"{way}{what}" for way in ("", "influence_", "late_") for what in ("loss", "flops")]
    ways += ["tokens_loss", "random_loss"]
    points = [dict.fromkeys(ways, at) | {"rate": 1.0 - at} for at in (0.5, 0.7, 0.9)]
    figures = figures_of(monkeypatch)
    maps.skip_curve_plot({"points": points, "dense": {"loss": 0.55, "flops": 1.0}, "chosen": 0.3})
    axes = figures[0].axes[0]
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert {"0", "0.01", "0.1", "0.3"} <= {*labels} and not any("$" in label for label in labels)
    low, high = axes.get_ylim()
    assert low < 0.5 - 0.55 and 0.9 - 0.55 < high
