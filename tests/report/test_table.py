import dataclasses
import io

import pytest
from rich.console import Console

from nagjax.report.labels import count, number, run_labels
from nagjax.report.table import comparison_table, step_time_ratio, to_html, to_markdown, to_rich
from nagjax.runs.log import load_run
from tests.run_folders import eval_line, final_lines, train_line


@pytest.fixture
def runs(make_run):
    slow = [train_line(step, 2.0, seconds=0.75) for step in range(1, 11)] + [eval_line(10, 1.79)]
    return [
        load_run(make_run("p", final_lines(1.81, dead=2), scheme="plain", lr=4e-3)),
        load_run(make_run("n", slow, scheme="nag", lr=8e-3)),
    ]


def column(table, start):
    (j,) = [j for j, name in enumerate(table.columns) if name.startswith(start)]
    return [row[j] for row in table.rows]


def test_values(runs):
    table = comparison_table(runs)
    assert [c.text for c in column(table, "scheme")] == ["plain pre-norm", "NAG"]
    assert [c.text for c in column(table, "parameters")] == ["1.53M", "1.53M"]
    assert [c.text for c in column(table, "learning rate")] == ["0.004", "0.008"]
    assert [c.text for c in column(table, "step time (ms)")] == ["500", "750"]
    assert [c.text for c in column(table, "step time / plain")] == ["1.00", "1.50"]
    assert [c.text for c in column(table, "validation loss")] == ["1.8100", "1.7900"]
    assert [c.text for c in column(table, "residual growth")] == ["1.82", "n/m"]  # exp(0.6)
    assert [c.text for c in column(table, "turn angle")] == ["6.5", "n/m"]
    assert [c.text for c in column(table, "updates below 5%")] == ["2/8", "n/m"]


def test_the_lowest_is_marked_ties_included(runs, make_run):
    third = load_run(make_run("l", [eval_line(10, 1.79000001)], scheme="lns"))
    table = comparison_table([*runs, third])
    assert [c.best for c in column(table, "validation loss")] == [False, True, True]
    assert [c.best for c in column(table, "step time (ms)")] == [True, False, False]
    assert not any(c.best for c in column(table, "parameters"))


def test_steps_of_two_machines_are_not_compared(runs):
    runs[1].info["device"] = "NVIDIA H200"
    assert not any(c.best for c in column(comparison_table(runs), "step time (ms)"))


def test_tokens_of_two_tokenizers_are_not_compared(runs, make_run):
    """A token of a larger vocabulary is more text: its loss is higher, where the bits per byte may be fewer."""
    other = load_run(
        make_run("t", [eval_line(10, 4.0) | {"bits_per_byte": 1.1}], data={"corpus": "stdlib", "tokenizer": "tok.json"})
    )
    table = comparison_table([*runs, other])
    assert not any(c.best for c in column(table, "validation loss"))
    assert [c.best for c in column(table, "bits per byte")] == [False, False, True]


def test_nan_is_never_the_best(runs, make_run):
    broken = load_run(make_run("b", [eval_line(10, float("nan"))], scheme="review"))
    cells = column(comparison_table([broken, *runs]), "validation loss")
    assert [c.text for c in cells] == ["NaN", "1.8100", "1.7900"]
    assert [c.best for c in cells] == [False, False, True]


def test_routed_runs_are_judged_as_sampled(runs, make_run):
    """The loss of the causal decider is in the table and decides; that of top-k stands beside it."""
    better_ahead = eval_line(10, 1.5) | {"causal_loss": 1.80, "causal_bits_per_byte": 2.6}
    table = comparison_table([*runs, load_run(make_run("m", [better_ahead]))])
    assert [c.text for c in column(table, "validation loss")] == ["1.8100", "1.7900", "1.8000"]
    assert [c.best for c in column(table, "validation loss")] == [False, True, False]
    assert [c.text for c in column(table, "bits per byte")][2] == "2.6000"
    assert [c.text for c in column(table, "the same by top-k")] == ["n/m", "n/m", "1.5000"]
    assert not any(name.startswith("the same by top-k") for name in comparison_table(runs).columns)


def test_no_ratio_without_a_comparable_plain_run(runs):
    assert "step time / plain" not in comparison_table(runs[1:]).columns


@pytest.mark.parametrize("section, changed", [("model", {"hidden": 512}), ("train", {"accumulate": 8})])
def test_no_ratio_to_a_run_of_another_shape(runs, section, changed):
    plain, nag = runs
    other = dataclasses.replace(nag, config=nag.config | {section: nag.config[section] | changed})
    assert step_time_ratio(nag, runs) == 1.5 and step_time_ratio(other, [plain, other]) is None


def test_a_routed_run_stands_beside_the_dense_one(runs):
    plain, nag = runs
    skipping = {"info": nag.info | {"mod_rate": {"total": 0.25}}}
    routed = dataclasses.replace(nag, **skipping)
    assert step_time_ratio(routed, [plain, routed]) == 1.5
    assert step_time_ratio(nag, [dataclasses.replace(plain, **skipping), nag]) is None


def test_no_ratio_to_a_run_on_another_cpu(runs):
    runs[0].info["cpu"], runs[1].info["cpu"] = "Intel Xeon", "AMD EPYC"
    assert [c.text for c in column(comparison_table(runs), "step time / plain")] == ["1.00", "n/m"]
    runs[1].info["cpu"] = "Intel Xeon"
    assert [c.text for c in column(comparison_table(runs), "step time / plain")] == ["1.00", "1.50"]


def test_no_bits_where_targets_stand_for_no_bytes(runs, make_run):
    silent = load_run(make_run("s", [eval_line(10, 1.9) | {"bits_per_byte": None}]))
    broken = load_run(make_run("b", [eval_line(10, float("nan"))]))
    assert [c.text for c in column(comparison_table([silent, broken]), "bits per byte")] == ["n/m", "NaN"]


@pytest.mark.parametrize("width", [50, 80, 200])
def test_the_terminal_table_fits_and_shows_every_number(runs, width):
    table = comparison_table(runs)
    console = Console(file=io.StringIO(), width=width)
    console.print(to_rich(table, width))
    text = console.file.getvalue()
    assert max(map(len, text.splitlines())) <= width
    assert "*1.7900" in text and "*1.8100" not in text
    for row in table.rows:
        assert all(cell.text in text for cell in row[1:])
        assert all(word in text for word in row[0].text.split())
    assert text.count("parameters") == (2 if width == 50 else 1)  # the second run goes below


def test_names_from_a_log_do_not_steer_the_terminal(runs):
    table = comparison_table(runs)
    console = Console(file=io.StringIO(), width=200)
    named = dataclasses.replace(table, columns=(*table.columns[:-1], "task \x1b[2J"))
    console.print(to_rich(named, 200))
    assert "task ?[2J" in console.file.getvalue() and "\x1b[2J" not in console.file.getvalue()


def test_markdown_and_html(runs):
    table = comparison_table(runs)
    lines = to_markdown(table).splitlines()
    assert lines[:2] == ["| scheme | plain pre-norm | NAG |", "| :-- | --: | --: |"]
    assert len(lines) == 1 + len(table.columns)
    assert "| validation loss (nats/token) | 1.8100 | **1.7900** |" in lines
    page = to_html(table)
    assert page.count("<td>") == 2 * (len(table.columns) - 1)
    assert (
        "<tr><th>step time (ms)</th><td><strong>500</strong></td><td>750</td></tr>" in page
        and "<thead><tr><th>scheme</th><th>plain pre-norm</th><th>NAG</th></tr></thead>" in page
    )


def test_labels_are_distinct(make_run):
    same = [load_run(make_run(name, [], scheme="nag")) for name in ("a", "b")]
    assert run_labels(same) == ["NAG a", "NAG b"]
    assert run_labels([same[0], same[0]]) == ["NAG a #1", "NAG a #2"]
    assert run_labels(same[:1]) == ["NAG"]


@pytest.mark.parametrize(
    ("value", "text"),
    [(0, "0"), (999, "999"), (999.7, "1k"), (20480, "20.5k"), (1.53e6, "1.53M"), (3e19, "3e+04P")],
)
def test_counts(value, text):
    assert count(value) == text


def test_numbers():
    assert [number(v, 2) for v in (None, float("nan"), 1.005, 3.0)] == ["n/m", "NaN", "1.00", "3.00"]
