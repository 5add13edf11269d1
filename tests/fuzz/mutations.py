"""What may happen to a file in somebody else's hands: every field of a JSON value changed, bytes changed, the file
replaced by something that is none."""

import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

DEEP = 300
HOSTILE = (
    *(None, True, False, -1, 0, 1, 2, 3, 255, 2**31 - 1, 2**31, 2**32, 2**53, 2**62, 2**63, 2**64, 10**30, -(2**63)),
    *(0.5, -0.5, 1.5, 1e-300, 1e300, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "x",
        "0",
        "1",
        "nag",
        "bytes",
        "../../../etc/passwd",
        "/etc/passwd",
        "a\0b",
        "\ud800",
        "\x1b[31m",
        "é" * 5000,
    ),
    *([], {}, [None], [[]], {"": {}}, [0] * 1000, {"a": 1}, ["x", 1, None]),
)
Value = object


def places(value: Value, at: tuple = ()) -> list[tuple]:
    """The path to every value inside, starting with the whole."""
    found = [at]
    if isinstance(value, dict):
        for name, inner in value.items():
            found += places(inner, (*at, name))
    elif isinstance(value, list):
        for i in range(min(len(value), 4)):
            found += places(value[i], (*at, i))
    return found


def changed(value: Value, at: tuple, change: Callable[[Value], Value]) -> Value:
    """A copy with another value at that path."""
    if not at:
        return change(value)
    copy = value.copy()
    copy[at[0]] = changed(copy[at[0]], at[1:], change)
    return copy


def mutated_json(rng: random.Random, value: Value) -> str:
    """The JSON text of the value after one change."""
    at = rng.choice(places(value))
    how = rng.choice(("hostile", "hostile", "hostile", "remove", "add", "scale", "deep", "twice", "swap", "number"))
    if how == "remove" and at:
        return json.dumps(changed(value, at[:-1], lambda outer: without(outer, at[-1])))
    if how == "add":
        more = {rng.choice(("more", "", "name", "__class__", "\ud800")): rng.choice(HOSTILE)}
        return json.dumps(changed(value, at, lambda old: old | more if isinstance(old, dict) else [old, more]))
    if how == "scale":
        scale = rng.choice((-1, 2, 1000, 0.5, 1e200))
        return json.dumps(changed(value, at, lambda old: old * scale if isinstance(old, int | float) else str(old) * 2))
    if how == "swap":
        other = rng.choice(places(value))
        found = value
        for step in other:
            found = found[step]
        return json.dumps(changed(value, at, lambda old: found))
    mark = "MARK-of-a-place"
    text = json.dumps(changed(value, at, lambda old: mark))
    if how == "deep":
        left, right = rng.choice((("[", "]"), ('{"a":', "}")))
        depth = rng.choice((DEEP, 60_000))
        return text.replace(f'"{mark}"', left * depth + "1" + right * (depth if rng.random() < 0.5 else 0), 1)
    if how == "twice":
        return text.replace(f'"{mark}"', '{"a": 1, "a": 2}', 1)
    if how == "number":
        return text.replace(f'"{mark}"', rng.choice(("1e999", "-1e999", "NaN", "9" * 5000, "0x10", "01", "1_000")), 1)
    return json.dumps(changed(value, at, lambda old: rng.choice(HOSTILE)))


def without(outer: Value, name: Value) -> Value:
    if isinstance(outer, dict):
        return {key: inner for key, inner in outer.items() if key != name}
    return [inner for i, inner in enumerate(outer) if i != name]


def mutated_bytes(rng: random.Random, content: bytes) -> bytes:
    """Bytes changed, lost, doubled or added."""
    how = rng.choice(("flip", "cut", "zero", "lose", "double", "insert", "append", "empty", "noise"))
    at = rng.randrange(len(content) + 1)
    end = min(len(content), at + rng.randint(1, 64))
    noise = rng.randbytes(rng.randint(1, 64))
    if how == "flip" and content:
        at = rng.randrange(len(content))
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :]
    return {
        "cut": content[:at],
        "zero": content[:at] + bytes(end - at) + content[end:],
        "lose": content[:at] + content[end:],
        "double": content[:end] + content[at:],
        "insert": content[:at] + noise + content[at:],
        "append": content + noise,
        "empty": b"",
    }.get(how, noise)


def json_file(rng: random.Random, path: Path) -> None:
    try:
        value = json.loads(path.read_bytes())
        text = mutated_json(rng, value)
        path.write_bytes(text.encode("utf-8", "surrogatepass"))
    except ValueError:
        path.write_bytes(mutated_bytes(rng, path.read_bytes()))


def json_lines(rng: random.Random, path: Path) -> None:
    lines = path.read_text().splitlines()
    i = rng.randrange(len(lines))
    lines[i] = mutated_json(rng, json.loads(lines[i]))
    path.write_bytes(("\n".join(lines) + rng.choice(("\n", ""))).encode("utf-8", "surrogatepass"))


def safetensors(rng: random.Random, path: Path) -> None:
    """Changes its header, makes a weight NaN or infinite, or adds or removes bytes."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header, body = content[8 : 8 + length], bytearray(content[8 + length :])
    how = rng.choice(("header", "header", "length", "weights", "more", "less"))
    if how == "header":
        header = mutated_json(rng, json.loads(header)).encode("utf-8", "surrogatepass")
        length = len(header)
    elif how == "length":
        length = rng.choice((0, 1, length + 1, 2**32, 2**63, 2**64 - 1))
    elif how == "weights":
        at = rng.randrange(0, len(body), 4)
        body[at : at + 4] = rng.choice((b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff"))
    elif how == "more":
        body += rng.randbytes(rng.randint(1, 100))
    else:
        del body[rng.randrange(len(body)) :]
    path.write_bytes(length.to_bytes(8, "little") + header + bytes(body))


def replaced(rng: random.Random, path: Path) -> None:
    """Replaces the file by nothing, a folder, a link, a pipe, or a file of 8 GiB."""
    outside = path.parent.parent / "outside"
    how = rng.choice(("lost", "folder", "link", "dangling", "circle", "pipe", "forbidden", "huge"))
    if how == "huge" and path.suffix not in (".json", ".safetensors", ".tokens", ".documents"):
        how = "lost"  # documents and logs may be of any size: they are read piece by piece
    if how == "forbidden":
        path.chmod(0)
        return
    if how == "link":
        if outside.is_dir():
            shutil.rmtree(outside)
        shutil.move(path, outside)
        path.symlink_to(outside)
        return
    path.unlink()
    if how == "folder":
        path.mkdir()
    elif how == "dangling":
        path.symlink_to(path.parent / "nowhere")
    elif how == "circle":
        path.symlink_to(path)
    elif how == "pipe":
        os.mkfifo(path)
    elif how == "huge":
        with path.open("wb") as file:
            file.truncate(1 << 33)


def raw(rng: random.Random, path: Path) -> None:
    path.write_bytes(mutated_bytes(rng, path.read_bytes()))


def mutate(rng: random.Random, path: Path) -> str:
    """Changes the file once; returns the kind of the change."""
    own = {".json": json_file, ".jsonl": json_lines, ".safetensors": safetensors}.get(path.suffix, raw)
    kind = rng.choices((own, raw, replaced), (6, 2, 1))[0]
    try:
        kind(rng, path)
    except (RecursionError, ValueError, IndexError, TypeError, KeyError, OverflowError):
        raw(rng, path)
        kind = raw
    return kind.__name__
