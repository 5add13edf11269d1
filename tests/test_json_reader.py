"""The one reader of JSON: its limits, its types, and that no code of nagjax bypasses it."""

import ast
import io
import re
from dataclasses import dataclass, field
from pathlib import Path

import pytest

import nagjax
from nagjax.errors import UserError
from nagjax.files import read_json
from nagjax.json_reader import DEEPEST, build, parse_json, read_lines
from nagjax.ranges import Count, Share

PARSERS = {"json": {"load", "loads", "JSONDecoder"}, "pickle": {"load", "loads"}, "np": {"load"}, "yaml": {"load"}}


def test_nothing_else_parses_json():
    root, found = Path(nagjax.__file__).parent, []
    for path in root.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module in ("json", "pickle"):
                found += [(path.name, alias.name) for alias in node.names if alias.name in PARSERS[node.module]]
            elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
                found += [(path.name, node.attr)] if node.attr in PARSERS.get(node.value.id, ()) else []
    # a run as a file is YAML, by a loader of few types (tests/test_security.py)
    assert {*found} == {("json_reader.py", "JSONDecoder"), ("config_file.py", "load")}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[" * 60_000, "nested more than"),
        ("[" * (DEEPEST + 1) + "]" * (DEEPEST + 1), "nested more than"),
        ('{"a":' * 60_000 + "1" + "}" * 60_000, "nested more than"),
        ("NaN", "not a finite number"),
        ("-Infinity", "not a finite number"),
        ("1e999", "not a finite number"),
        (str(2**64), "20 digits"),
        ("9" * 5000, "5000 digits"),
        ('{"a": 1, "b": 2, "a": 3}', "'a' is there twice"),
        (r'"\ud800"', "surrogates not allowed"),
        (b'"\xff"', "can't decode"),
        ("", "Expecting value"),
        ("{} {}", "Extra data"),
    ],
)
def test_limits(text, said):
    with pytest.raises(ValueError, match=re.escape(said)):
        parse_json(text)


def test_within_the_limits():
    assert parse_json("[" * DEEPEST + "]" * DEEPEST)
    assert parse_json(f"[{2**64 - 1}, -1, -0, 0.5, {1 - 2**64}]") == [2**64 - 1, -1, 0, 0.5, 1 - 2**64]
    assert parse_json(r'"\ud83d\ude00"') == "😀"
    assert parse_json(b'{"a": NaN, "a": Infinity}', lenient=True) == {"a": float("inf")}


def test_a_mark_of_the_byte_order_may_stand_before_it():
    assert parse_json('{"a": 1}'.encode("utf-8-sig")) == {"a": 1}


def test_a_file_of_any_size_takes_no_more_memory_than_its_limit(tmp_path):
    with (tmp_path / "big.json").open("wb") as file:
        file.truncate(1 << 40)
    with pytest.raises(ValueError, match="more than 1,000 bytes"):
        read_json(tmp_path / "big.json", largest=1000)


@dataclass(frozen=True)
class Inner:
    share: Share


@dataclass(frozen=True)
class Outer:
    count: Count
    inner: Inner
    name: str | None = None
    shares: tuple[Share, ...] = ()
    rest: dict = field(default_factory=dict)
    by_name: dict[str, list[Inner]] = field(default_factory=dict)


def test_a_record_is_what_its_class_declares():
    made = build(Outer, {"count": 2, "inner": {"share": 1}, "shares": [0, 0.5], "by_name": {"a": [{"share": 0.25}]}})
    assert made == Outer(2, Inner(1), None, (0, 0.5), {}, {"a": [Inner(0.25)]})
    assert build(Inner, {"share": 0.5, "more": 1}, others=(Inner,)) == Inner(0.5)


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ([], "Outer = []: must be one JSON object"),
        ({"inner": {"share": 0}}, "count = None: is missing"),
        ({"count": 1, "inner": {}}, "inner.share = None: is missing"),
        ({"count": 1, "inner": 3}, "inner = 3: must be one JSON object"),
        ({"count": 1, "inner": {"share": 2}}, "inner.share = 2: give a number from 0 to 1"),
        ({"count": True, "inner": {"share": 0}}, "count = True: give a whole number"),
        ({"count": 2**31, "inner": {"share": 0}}, "count = 2147483648: give a whole number"),
        ({"count": 1, "inner": {"share": 0}, "name": 5}, "name = 5: give a text"),
        ({"count": 1, "inner": {"share": 0}, "shares": [0, "x"]}, "shares[1] = 'x': give a number"),
        ({"count": 1, "inner": {"share": 0}, "rest": []}, "rest = []: must be one JSON object"),
        ({"count": 1, "inner": {"share": 0}, "by_name": {"a": {}}}, "by_name.a = {}: must be a list"),
        ({"count": 1, "inner": {"share": 0}, "by_name": {"a": [{}]}}, "by_name.a[0].share = None: is missing"),
        ({"count": 1, "inner": {"share": 0, "more": 1}}, "inner = ['more']: Inner has no such fields"),
    ],
)
def test_a_field_that_is_not_what_it_may_be_is_named(values, said):
    with pytest.raises(UserError, match=re.escape(said)):
        build(Outer, values)


def lines(content: bytes, largest: int = 100) -> list:
    return list(read_lines(io.BytesIO(content), "log", largest))


def test_a_log_ends_where_its_writer_was_stopped():
    assert lines(b'{"a": 1}\n\n[2]\n{"a": ') == [(1, {"a": 1}), (3, [2])]
    assert lines(b"1\n2") == [(1, 1), (2, 2)]  # a last line that is whole


@pytest.mark.parametrize("content", [b'1\n{"a": \n3\n', b"1\n\xff\n", b"1\n" + b"[" * 90 + b"\n2\n"])
def test_other_damage_names_the_line(content):
    with pytest.raises(UserError, match=r"log:2.*repair or remove this line"):
        lines(content)


def test_a_line_without_end_is_not_read():
    with pytest.raises(UserError, match="log:1.*more than 100 bytes"):
        lines(b"1" * 1_000_000)


def test_what_is_said_of_a_value_is_short():
    assert len(str(UserError("field", "x" * 10**6, "fix"))) < 1000
