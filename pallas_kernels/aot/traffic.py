"""The bytes that a compiled program moves and its communication, read from its text.

The bytes of an instruction are those of the buffers that it reads and writes in main memory: a fusion, a kernel or a
copy touches each of them once, and what happens inside it stays on chip. Buffers that the TPU compiler keeps in VMEM
(memory space 1) cost nothing; copying them there does. `cost_analysis()` is not enough: on GPU it is empty, and for TPU
it does not distinguish memory spaces.
"""

import collections
import re

from pallas_kernels.hlo import Instruction, Program, parse, parts, size

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id")


def traffic(text: str) -> int:
    """Bytes that the entry computation reads from and writes to main memory."""
    instructions, types = _entry(parse(text))
    return sum(_moved(i, types) for i in instructions)


def kernel_traffic(text: str, target: str) -> int:
    """Bytes of the operands and results of all custom calls whose target contains `target`."""
    instructions, types = _entry(parse(text))
    return sum(
        size(i.type, everywhere=True) + sum(size(types[o], everywhere=True) for o in i.operands)
        for i in instructions
        if i.opcode == "custom-call" and target in i.attributes
    )


def collectives(text: str) -> dict[str, int]:
    """The number of each kind of collective in the whole program, loops counted once."""
    found = collections.Counter(opcode for opcode in COLLECTIVES for _ in re.finditer(rf" {opcode}(?:-start)?\(", text))
    return dict(found)


def custom_calls(text: str) -> dict[str, int]:
    """How often each custom call target occurs in the whole program."""
    return dict(collections.Counter(re.findall(r'custom_call_target="([^"]+)"', text)))


def _entry(program: Program) -> tuple[tuple[Instruction, ...], dict[str, str]]:
    """The instructions of the entry computation, and their types by name."""
    instructions = program.computations[program.entry].instructions
    return instructions, {i.name: i.type for i in instructions}


def _moved(instruction: Instruction, types: dict[str, str]) -> int:
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith("-done") or '"ConcatBitcast"' in instruction.attributes:
        return 0
    if opcode in ("copy-start", "slice-start"):  # (destination, source, ..) and ((source), destination, ..)
        destination = parts(instruction.type)[opcode == "slice-start"]
        whole = size(destination, everywhere=True)
        return size(destination) + (whole if size(types[instruction.operands[0]]) else 0)
    return size(instruction.type) + sum(size(types[o]) for o in instruction.operands)
