"""What is printed, and the tables of the documentation."""

import re

import pytest

from benchmarks import plan_tables as tables
from nagjax.plan.report import report
from nagjax.plan.units import gigabytes, milliseconds, scaled


def test_a_fitting_plan_shows_everything(fitting):
    text = report(fitting)
    for word in ("It fits", "all-gather", "7 x", "100 FLOP/B", "memory bound", "0.50 $", "94% of", "40 M", "k x3"):
        assert word in text, word


def test_a_plan_that_does_not_fit_says_what_to_do(result):
    text = report(result)
    assert "does not fit" in text and "--remat block" in text and "60.00 GiB" in text and "It fits" not in text


@pytest.mark.parametrize("saved, rows", [(2, 7), (3, 6), (40, 6)])
def test_the_parts_of_the_memory_add_up_to_the_peak(fitting, saved, rows):
    fitting["memory"] |= {"batch": 0, "saved": saved * 2**30}
    table = report(fitting).partition("memory of each device\n")[2].partition("\n\n")[0].splitlines()
    assert len(table) == rows
    *parts, peak, _ = [float(re.search(r"([\d.]+) [GM]iB", row)[1]) for row in table]
    assert sum(parts) == peak == 15.0 and min(part for part in parts if part) > 0


def test_units():
    assert gigabytes(2**30) == "1.00 GiB" and gigabytes(2**20) == "1.0 MiB"
    assert scaled(1.5e12, "FLOP") == "1.5 TFLOP" and scaled(12) == "12" and scaled(2e3) == "2 k"
    assert scaled(999.6e9, "B") == "1 TB" and milliseconds(0.9996) == "1 s"
    assert milliseconds(999.4) == "999 s" and milliseconds(999.6) == "1,000 s" and milliseconds(12_345) == "12,345 s"
    assert milliseconds(0.0123) == "12.3 ms" and milliseconds(2) == "2 s"


def test_tables(fitting, result):
    text = tables.standard([fitting, result])
    lines = text.splitlines()
    assert len(lines) == 4 and len({line.count("|") for line in lines}) == 1
    assert "does not fit" in lines[3] and "25%" in lines[2]
    lines = tables.remat([fitting, result]).splitlines()
    assert "1.00x" in lines[2] and "does not fit" in lines[3]
    *_, line = tables.bills([fitting | {"model_flops_per_token": 1e9}, result], 20).splitlines()
    tokens, chips = 20 * fitting["parameters"], fitting["chips"]
    hours = tokens / fitting["tokens_per_second"] / 3600
    assert f"| {tokens / 1e9:.1f}B |" in line and line.endswith(f"| {hours:,.1f} | {chips * hours:,.1f} |")


def test_a_table_goes_between_its_marks():
    document = "a\n<!-- x -->\nold\n<!-- x -->\nb\n"
    assert tables.insert(document, "x", "new") == "a\n<!-- x -->\nnew\n<!-- x -->\nb\n"
    with pytest.raises(ValueError, match="mark"):
        tables.insert("nothing", "x", "new")
