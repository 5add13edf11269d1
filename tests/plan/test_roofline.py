"""The bound: which resource is the slowest, and what follows from it."""

import pytest

from nagjax.plan.bill import bill
from nagjax.plan.roofline import Roofline, throughput
from nagjax.plan.topology import parse


def test_each_resource_at_its_peak():
    found = Roofline.of(parse("v5e:4x4"), flops=197e12, moved=819e9 / 2, sent=200e9 / 4)
    assert (found.compute, found.memory, found.interconnect) == pytest.approx((1.0, 0.5, 0.25))
    assert found.seconds == 1.0 and found.limit == "compute"


def test_the_slowest_decides():
    assert Roofline(1.0, 2.0, 0.1).limit == "memory" and Roofline(1.0, 2.0, 3.0).limit == "interconnect"
    assert Roofline(1.0, 2.0, 3.0).seconds == 3.0


def test_one_chip_sends_nothing():
    assert Roofline.of(parse("h200x1"), 1e12, 1e9, 0.0).interconnect == 0.0


def test_price_of_a_billion_tokens():
    found = throughput(seconds=2.0, tokens=4_000_000, chips=16, dollars_per_hour=1.5)
    assert found["tokens_per_second"] == 2e6 and found["tokens_per_second_per_chip"] == 125e3
    hours = 1e9 / 2e6 / 3600
    assert found["dollars_per_billion_tokens"] == pytest.approx(hours * 16 * 1.5)
    assert throughput(2.0, 1, 1, None)["dollars_per_billion_tokens"] is None


PLANNED = {"chips": 16, "chip": {"flops": 1e14}, "tokens_per_second": 4e6, "model_flops_per_token": 1e8}


def test_a_bill_at_the_bound_and_at_an_assumed_utilization():
    found = bill(PLANNED | {"highest_mfu": 0.25, "dollars_per_hour": 1.5}, tokens=3.6e9, mfu=0.1)
    assert found["bound"] == pytest.approx({"hours": 0.25, "chip_hours": 4.0, "dollars": 6.0})
    hours = 3.6e9 * 1e8 / (0.1 * 16 * 1e14) / 3600
    assert found["assumed"] == pytest.approx({"hours": hours, "chip_hours": 16 * hours, "dollars": 24 * hours})


def test_no_bill_is_below_the_bound():
    found = bill(PLANNED | {"highest_mfu": 0.25, "dollars_per_hour": None}, tokens=3.6e9, mfu=0.9)
    assert found["assumed"] == found["bound"] and found["bound"]["dollars"] is None and found["mfu"] == 0.25
