"""Names of machines, and the errors for unknown names."""

import pytest

from nagjax.errors import UserError
from nagjax.plan.chips import CHIPS
from nagjax.plan.topology import known, parse, require


@pytest.mark.parametrize(
    "name, size, platform",
    [("v5e:4x4", 16, "tpu"), ("v5p:2x2x1", 4, "tpu"), ("V6E:2x4", 8, "tpu"), ("h200x8", 8, "cuda")],
)
def test_names(name, size, platform):
    found = parse(name)
    assert (found.size, found.chip.platform, found.name) == (size, platform, name.lower())


@pytest.mark.parametrize(
    "rented, name", [("v5e-16", "v5e:4x4"), ("v5litepod-64", "v5e:8x8"), ("v5p-16", "v5p:2x2x2"), ("V6e-4", "v6e:2x2")]
)
def test_names_that_slices_are_rented_under(rented, name):
    assert parse(rented).name == name


def test_every_known_name_is_its_own():
    assert known() == [parse(name).name for name in known()]
    assert "v5p:8x8x4" in known() and "h200x8" in known()


@pytest.mark.parametrize(
    "name, nearest",
    [
        ("v5e:5x5", "v5e:4x8"),
        ("v5e:4x4x4", "v5e:8x8"),
        ("h200x7", "h200x8"),
        ("h200", "h200x1"),
        ("v5f:4x4", "v5e:4x4"),
        ("v5e-17", "v5e:4x4"),
        ("v5p-12", "v5p:2x2x2"),
        ("v5litepod-3", "v5e:2x2"),
    ],
)
def test_an_unknown_name_gets_the_nearest(name, nearest):
    with pytest.raises(UserError) as error:
        parse(name)
    assert f"did you mean {nearest}?" in str(error.value) and "v6e:2x2" in str(error.value)


@pytest.mark.parametrize("name", ["", "tpu", "v5e:", "v5e:0x4", "8", "v5e:4x", "x8"])
def test_no_name_crashes(name):
    with pytest.raises(UserError, match="known"):
        parse(name)


def test_short_torus_dimensions_have_fewer_links():
    # v5e: 4 links of 50 GB/s; a dimension of 2 has one of its two.
    assert parse("v5e:4x4").egress == 200e9
    assert parse("v5e:2x4").egress == 150e9
    assert parse("v5e:2x2").egress == 100e9
    assert parse("v5p:2x2x1").egress == 200e9
    assert parse("h200x2").egress == 450e9


def test_every_chip_names_its_source():
    for chip in CHIPS.values():
        assert chip.source.startswith("https://") and chip.memory_note
        assert ("gpu_device_info" in chip.description) == (chip.platform == "cuda")


@pytest.mark.parametrize("name", ["v5e:2x2", "h200x8"])
def test_a_missing_compiler_names_the_command(name, monkeypatch):
    monkeypatch.setattr("nagjax.plan.topology._installed", lambda module: False)
    with pytest.raises(UserError, match=rf"topology = '{name}': .*pip install -e '\.\[aot\]'"):
        require(parse(name))
