"""What a compiled program moves and communicates, read from its text.

The bytes of an instruction are the bytes of the buffers it reads and writes in main memory: a fusion, a
kernel or a copy touches each of them once, and what happens inside it stays on chip. Buffers that the TPU
compiler keeps in VMEM (memory space 1) cost nothing; bringing them there does. `cost_analysis()` says less:
on GPU it is empty, and for TPU it does not tell memory spaces apart.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterator

SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4}
SIZES |= {"f64": 8, "s64": 8, "u64": 8, "token": 0}
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id")

_BUFFER = re.compile(r"(\w+)\[([\d,]*)\](\{[^{}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str


def size(type_text: str, everywhere: bool = False) -> int:
    """Bytes of all buffers of a type: those in main memory, or those on chip too."""
    total = 0
    for dtype, dims, layout in _BUFFER.findall(type_text):
        if dtype in SIZES and (everywhere or "S(" not in layout):
            total += SIZES[dtype] * math.prod(int(d) for d in dims.split(",") if d)
    return total


def entry(text: str) -> list[Instruction]:
    """The instructions of a compiled program's entry computation."""
    body = text[text.index("\nENTRY ") :]
    lines = body[: body.index("\n}")].splitlines()[2:]
    return [i for i in map(_instruction, lines) if i is not None]


def traffic(text: str) -> int:
    """Bytes that the entry computation reads from and writes to main memory."""
    program = entry(text)
    types = {i.name: i.type for i in program}
    return sum(_moved(i, types) for i in program)


def kernel_traffic(text: str, target: str) -> int:
    """Bytes of the operands and results of all custom calls whose target contains `target`."""
    program = entry(text)
    types = {i.name: i.type for i in program}
    return sum(
        size(i.type, everywhere=True) + sum(size(types[o], everywhere=True) for o in i.operands)
        for i in program
        if i.opcode == "custom-call" and target in i.attributes
    )


def collectives(text: str) -> dict[str, int]:
    """How many of each collective the whole program contains, loops counted once."""
    found = collections.Counter(opcode for opcode in COLLECTIVES for _ in re.finditer(rf" {opcode}(?:-start)?\(", text))
    return dict(found)


def custom_calls(text: str) -> dict[str, int]:
    """How often each custom call target occurs in the whole program."""
    return dict(collections.Counter(re.findall(r'custom_call_target="([^"]+)"', text)))


def _moved(instruction: Instruction, types: dict[str, str]) -> int:
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith("-done") or '"ConcatBitcast"' in instruction.attributes:
        return 0
    if opcode in ("copy-start", "slice-start"):  # (destination, source, ..) and ((source), destination, ..)
        destination = list(_parts(instruction.type))[opcode == "slice-start"]
        whole = size(destination, everywhere=True)
        return size(destination) + (whole if size(types[instruction.operands[0]]) else 0)
    return size(instruction.type) + sum(size(types[o]) for o in instruction.operands)


def _instruction(line: str) -> Instruction | None:
    head, equals, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    if not equals:
        return None
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, tail = rest[end:].strip().partition("(")
    close = _closing("(" + tail) - 1
    return Instruction(head.lstrip("%"), rest[:end], opcode, tuple(_NAME.findall(tail[:close])), tail[close + 1 :])


def _closing(text: str) -> int:
    """The position of the parenthesis that closes the one at position 0."""
    depth = 0
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return position
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")


def _parts(tuple_type: str) -> Iterator[str]:
    """The elements of a tuple type."""
    depth, start = 0, 1
    for position, letter in enumerate(tuple_type):
        depth += (letter in "([{") - (letter in ")]}")
        if (depth == 1 and letter == ",") or depth == 0:
            yield tuple_type[start:position]
            start = position + 1
