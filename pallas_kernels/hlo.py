"""Parses a compiled program's text into computations and instructions."""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator

BITS = {"pred": 8, "bf16": 16, "c64": 64, "c128": 128, "token": 0, "opaque": 0}
BITS |= {f"{kind}{bits}": bits for kind in "su" for bits in (1, 2, 4, 8, 16, 32, 64)}
BITS |= {f"f{bits}": bits for bits in (16, 32, 64)}
_SMALL_FLOAT = re.compile(r"f(\d+)e\d+m\d+\w*")  # f8e4m3fn, f8e8m0fnu, f4e2m1fn, ...

_ARRAY = re.compile(r"(\w+)\[([\d,]*)\](\{[^{}]*\})?")
_NAME = re.compile(r"%([\w.\-]+)")
_HEADER = re.compile(r"^(ENTRY )?%([\w.\-]+) \(.*\) -> .*\{$")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One instruction; `attributes` is the text after the operands."""

    name: str
    type: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    @functools.cached_property
    def called(self) -> tuple[str, ...]:
        """Names of the computations that this instruction calls."""
        branches = _BRANCHES.search(self.attributes)
        return tuple(_CALLED.findall(self.attributes)) + tuple(_NAME.findall(branches[1]) if branches else ())

    def attribute(self, name: str) -> str | None:
        """The computation named by `name=%...`."""
        found = re.search(rf"\b{name}=%([\w.\-]+)", self.attributes)
        return found and found[1]


@dataclasses.dataclass(frozen=True)
class Computation:
    name: str
    instructions: tuple[Instruction, ...]
    root: Instruction

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {i.name: i for i in self.instructions}

    @functools.cached_property
    def parameters(self) -> dict[int, str]:
        """Names of the parameters by position."""
        return {int(i.attributes): i.name for i in self.instructions if i.opcode == "parameter"}

    @functools.cached_property
    def users(self) -> dict[str, list[Instruction]]:
        found: dict[str, list[Instruction]] = {i.name: [] for i in self.instructions}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return found

    def type_of(self, name: str) -> str:
        return self.by_name[name].type


@dataclasses.dataclass(frozen=True)
class Program:
    computations: dict[str, Computation]
    entry: str

    def instructions(self) -> Iterator[Instruction]:
        """The instructions of all computations."""
        for computation in self.computations.values():
            yield from computation.instructions


def arrays(type_text: str) -> list[tuple[str, tuple[int, ...], str]]:
    """(dtype, shape, layout) of every array in a type."""
    return [
        (dtype, tuple(int(d) for d in dims.split(",") if d), layout)
        for dtype, dims, layout in _ARRAY.findall(type_text)
    ]


def _bytes(dtype: str) -> float:
    """Bytes of one element. Raises ValueError for an unknown dtype: counting it as nothing would make a plan wrong."""
    small = _SMALL_FLOAT.fullmatch(dtype)
    if small is None and dtype not in BITS:
        raise ValueError(f"the compiled program has arrays of {dtype}: add their bits to {__name__}.BITS")
    return (int(small[1]) if small else BITS[dtype]) / 8


def size(type_text: str, everywhere: bool = False) -> int:
    """Bytes of all arrays of a type that are in main memory; with `everywhere` also of those that a TPU keeps on
    chip."""
    return int(
        sum(
            _bytes(dtype) * math.prod(shape)
            for dtype, shape, layout in arrays(type_text)
            if everywhere or "S(" not in layout
        )
    )


def parts(type_text: str) -> list[str]:
    """The elements of a tuple type; for any other type, the type itself."""
    if not type_text.startswith("("):
        return [type_text]
    found, depth, start = [], 0, 1
    for position, letter in enumerate(type_text):
        depth += (letter in "([{") - (letter in ")]}")
        if (depth == 1 and letter == ",") or depth == 0:
            found.append(type_text[start:position].strip())
            start = position + 1
    return [part for part in found if part]


def parse(text: str) -> Program:
    """The program, parsed from the text that the compiler prints."""
    computations, entry, name, lines = {}, "", "", []
    for line in text.splitlines():
        header = _HEADER.match(line)
        if header:
            name, lines = header[2], []
            entry = name if header[1] else entry
        elif line == "}" and name:
            instructions = [(i, line.startswith("  ROOT ")) for line in lines if (i := _instruction(line))]
            root = next((i for i, is_root in instructions if is_root), None) or instructions[-1][0]
            computations[name] = Computation(name, tuple(i for i, _ in instructions), root)
            name = ""
        elif name and re.match(r"  (ROOT )?%", line):
            lines.append(line)
        elif name and lines:
            lines[-1] += line  # an attribute may hold line breaks
    return Program(computations, entry)


def _instruction(line: str) -> Instruction | None:
    head, equals, rest = line.strip().removeprefix("ROOT ").partition(" = ")
    if not equals:
        return None
    end = _closing(rest) + 1 if rest.startswith("(") else rest.index(" ")
    opcode, _, tail = rest[end:].strip().partition("(")
    close = _closing("(" + tail) - 1
    inside = tail[:close]
    attributes = inside if opcode in ("parameter", "constant") else tail[close + 1 :]
    operands = () if opcode in ("parameter", "constant") else tuple(_NAME.findall(inside))
    return Instruction(head.lstrip("%"), rest[:end], opcode, operands, attributes)


def _closing(text: str) -> int:
    """The position of the parenthesis that closes the one at position 0."""
    depth = 0
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if depth == 0:
            return position
    raise ValueError(f"unbalanced parentheses in {text[:80]!r}")
