"""The bound: which resource is the slowest, and what follows from it."""

import pytest

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
