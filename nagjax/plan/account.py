"""The cost of one execution of a compiled program on one device, with loops counted as often as they run.

`cost_analysis()` counts the body of a loop once and is empty for GPUs, so the program's text is read instead:

- FLOPs of every matmul (a TPU program calls them convolutions) and of the attention kernels. Elementwise work,
  the row kernels, and masked blocks that a kernel skips are not counted.
- Bytes between main memory and the chip: every fusion, kernel and copy reads its operands and writes its results once.
  What a TPU keeps on chip costs nothing. If a buffer is only sliced or updated in place, only the slice counts.
- Bytes that each device sends in collectives with ring algorithms: (n - 1)/n of the whole for an all-gather or a
  reduce-scatter, twice that for an all-reduce.
"""

import collections
import dataclasses
import functools
import math
import re

from nagjax.layers import flash, grouped
from nagjax.plan.matmuls import flops_of
from pallas_kernels.hlo import Computation, Instruction, Program, parts, size

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "opt-barrier")
FREE_CALLS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound", "GatherScatterIndicesBitpacked")
WRAPPERS = ("call", "async-start", "map")


@dataclasses.dataclass(frozen=True)
class Collective:
    """The number of executions of a collective, and the bytes that one device sends in all of them."""

    count: int = 0
    sent: float = 0.0


@dataclasses.dataclass(frozen=True)
class Account:
    """FLOPs, bytes moved to and from main memory, collectives by kind, and kernel calls by name; all per device."""

    flops: float = 0.0
    moved: float = 0.0
    collectives: dict[str, Collective] = dataclasses.field(default_factory=dict)
    kernels: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def sent(self) -> float:
        return sum(c.sent for c in self.collectives.values())

    def plus(self, other: "Account", times: int = 1) -> "Account":
        kinds = dict(self.collectives)
        for kind, more in other.collectives.items():
            had = kinds.get(kind, Collective())
            kinds[kind] = Collective(had.count + times * more.count, had.sent + times * more.sent)
        kernels = collections.Counter(self.kernels)
        for name, count in other.kernels.items():
            kernels[name] += times * count
        return Account(
            self.flops + times * other.flops, self.moved + times * other.moved, kinds, dict(sorted(kernels.items()))
        )


def account(program: Program, devices: int) -> Account:
    """The cost of the entry computation on one of `devices` devices."""
    return _Walk(program, devices).computation(program.entry)


def loops(program: Program, devices: int) -> list[tuple[Account, int]]:
    """The cost of one iteration of each loop in the entry computation, and its number of iterations."""
    walk, home = _Walk(program, devices), program.computations[program.entry]
    return [walk._instruction(one, home) for one in home.instructions if one.opcode == "while"]


class _Walk:
    def __init__(self, program: Program, devices: int):
        self.program, self.devices = program, devices
        self.computation = functools.cache(self._computation)

    def _computation(self, name: str) -> Account:
        home, total = self.program.computations[name], Account()
        for instruction in home.instructions:
            total = total.plus(*self._instruction(instruction, home))
        return total

    def _instruction(self, one: Instruction, home: Computation) -> tuple[Account, int]:
        """The cost of one execution, and the number of executions."""
        if one.opcode == "while":
            inside = self.computation(one.attribute("body")).plus(self.computation(one.attribute("condition")))
            return inside, trip_count(one, self.program)
        if one.opcode == "conditional":
            return max((self.computation(c) for c in one.called), key=lambda a: (a.flops, a.moved)), 1
        if one.opcode in WRAPPERS:
            return functools.reduce(Account.plus, map(self.computation, one.called), Account()), 1
        if one.opcode in ("fusion", "fusion-start"):
            inner = self._inside(one.called)
            return Account(inner.flops, self._fusion_bytes(one, home), inner.collectives, inner.kernels), 1
        kinds = self._collective(one, home)
        return Account(flops_of(one, home), self._bytes(one, home), kinds, _kernel(one)), 1

    def _inside(self, names: tuple[str, ...]) -> Account:
        """FLOPs, collectives and kernels inside a fusion; bytes moved there stay on chip and do not count."""
        total = Account()
        for name in names:
            home = self.program.computations[name]
            for one in home.instructions:
                if one.opcode == "fusion":
                    total = total.plus(self._inside(one.called))
                else:
                    total = total.plus(Account(flops_of(one, home), 0.0, self._collective(one, home), _kernel(one)))
        return total

    def _collective(self, one: Instruction, home: Computation) -> dict[str, Collective]:
        kind = one.opcode.removesuffix("-start")
        if kind not in COLLECTIVES or one.opcode.endswith("-done") or _continued(one, home):
            return {}
        if home.name.startswith("all-reduce-scatter"):  # this is how a TPU program writes a reduce-scatter
            kind = "reduce-scatter"
        n = group_size(one.attributes, self.devices)
        given = sum(size(home.type_of(o), everywhere=True) for o in one.operands)
        share = {"all-gather": n - 1.0, "all-reduce": 2 * (n - 1) / n, "collective-permute": 1.0}
        return {kind: Collective(1, given * share.get(kind, (n - 1) / n))} if n > 1 else {}

    def _bytes(self, one: Instruction, home: Computation) -> float:
        opcode, types = one.opcode, [home.type_of(o) for o in one.operands]
        target = _target(one)
        if opcode in FREE or opcode.endswith("-done") or target in FREE_CALLS:
            return 0
        if opcode in ("copy-start", "slice-start"):  # (destination, source, ..) and ((source), destination, ..)
            destination = parts(one.type)[opcode == "slice-start"]
            return size(destination) + (size(destination, everywhere=True) if size(types[0]) else 0)
        if opcode in ("dynamic-slice", "slice", "gather"):
            return size(one.type) + (size(one.type, everywhere=True) if size(types[0]) else 0)
        if opcode in ("dynamic-update-slice", "scatter"):
            update = types[1] if opcode == "dynamic-update-slice" else types[-1]
            return size(update) + (size(update, everywhere=True) if size(types[0]) else 0)
        result = parts(one.type)[1] if opcode.endswith("-start") and len(parts(one.type)) > 1 else one.type
        return size(result) + sum(map(size, types))

    def _fusion_bytes(self, one: Instruction, home: Computation) -> float:
        inner = self.program.computations[one.called[0]]
        result = parts(one.type)[1] if one.opcode == "fusion-start" else one.type
        read = 0.0
        for position, operand in enumerate(one.operands):
            whole = size(home.type_of(operand))
            if whole:
                read += min(whole, self._read(inner, inner.parameters[position]))
        outputs, roots = parts(result), _outputs(inner)
        if len(outputs) != len(roots):
            outputs, roots = [result], [inner.root]
        return read + sum(
            min(size(t), self._written(inner, root)) for t, root in zip(outputs, roots, strict=True) if size(t)
        )

    def _read(self, home: Computation, name: str) -> float:
        """An upper bound of the bytes that a fused computation reads of one of its parameters."""
        total = 0.0
        for user in home.users[name]:
            if user.opcode == "bitcast":
                total += self._read(home, user.name)
            elif user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == name:
                total += size(user.type, everywhere=True)
            elif user.opcode == "dynamic-update-slice" and user.operands[0] == name:
                continue  # the rest is not read
            elif user.opcode == "fusion":
                inner = self.program.computations[user.called[0]]
                total += sum(self._read(inner, inner.parameters[i]) for i, o in enumerate(user.operands) if o == name)
            elif user is home.root and user.opcode == "tuple" or _continued(user, home):
                continue  # it is only passed on
            else:
                return math.inf
        return total

    def _written(self, home: Computation, one: Instruction) -> float:
        """An upper bound of the bytes that a fused computation writes of one of its results."""
        while one.opcode == "bitcast" and one.operands:
            one = home.by_name[one.operands[0]]
        if one.opcode == "dynamic-update-slice":
            return size(home.type_of(one.operands[1]), everywhere=True)
        if one.opcode == "parameter" or _continued(one, home):
            return 0
        if _target(one) == "AsyncCollectiveStart":
            return size(parts(one.type)[1])
        if one.opcode == "fusion":
            inner = self.program.computations[one.called[0]]
            if len(_outputs(inner)) == 1:
                return self._written(inner, inner.root)
        return math.inf


def trip_count(loop: Instruction, program: Program) -> int:
    """Iterations of a while loop: the compiler's annotation, else the bound in its condition divided by its counter's
    increment (a TPU program may do two steps in one iteration). Counters start at 0.
    """
    if noted := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
        return int(noted[1])
    condition = program.computations[loop.attribute("condition")]
    names = [condition.name, *(c for i in condition.instructions for c in i.called)]
    bounds = [
        int(one.attributes)
        for name in names
        for one in program.computations[name].instructions
        if one.opcode == "constant" and re.match(r"[su]\d+\[\]", one.type) and one.attributes.strip().isdigit()
    ]
    return math.ceil(max(bounds, default=1) / _step(condition, program.computations[loop.attribute("body")]))


def _step(condition: Computation, body: Computation) -> int:
    """The increment, per iteration, of the counter that the condition compares."""
    counters = [
        i for i in condition.instructions if i.opcode == "get-tuple-element" and re.match(r"[su]\d+\[\]", i.type)
    ]
    if len(counters) != 1 or body.root.opcode != "tuple":
        return 1
    position = int(re.search(r"index=(\d+)", counters[0].attributes)[1])
    one, step = body.by_name[body.root.operands[position]], 0
    while one.opcode in ("add", "copy", "bitcast"):
        operands = [body.by_name[o] for o in one.operands]
        step += sum(int(o.attributes) for o in operands if o.opcode == "constant" and o.attributes.strip().isdigit())
        rest = [o for o in operands if o.opcode != "constant"]
        if len(rest) != 1:
            return 1
        one = rest[0]
    return step or 1


def group_size(attributes: str, devices: int) -> int:
    """Devices that take part in one instance of a collective."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}", attributes):
        sizes = {name: int(n) for name, n in re.findall(r"'([^']+)'=(\d+)", named[1])}
        axes = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", named[2])
        return math.prod(int(part) if part else sizes[axis] for axis, _, part in axes)
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(listed[1].split(","))
    if shaped := re.search(r"replica_groups=\[(\d+),(\d+)\]", attributes):
        return int(shaped[2])
    return devices


def _continued(one: Instruction, home: Computation) -> bool:
    """Whether this only continues a collective that another fusion started (on a TPU, it overlaps with matmuls)."""
    if _target(one) == "AsyncCollectiveDone":
        return True
    if one.opcode not in COLLECTIVES or "chain_id=" not in one.attributes:
        return False
    return not any(_target(other) == "AsyncCollectiveStart" for other in home.instructions)


def _outputs(home: Computation) -> list[Instruction]:
    root = home.root
    return [home.by_name[o] for o in root.operands] if root.opcode == "tuple" else [root]


def _target(one: Instruction) -> str:
    if one.opcode != "custom-call":
        return ""
    found = re.search(r'custom_call_target="([^"]*)"', one.attributes)
    return found[1] if found else ""


def _kernel(one: Instruction) -> dict[str, int]:
    """The name of the kernel that an instruction calls, with a count of one."""
    if _target(one) not in ("tpu_custom_call", "__gpu$xla.gpu.triton", "mosaic_gpu_v2", "triton_kernel_call_ffi"):
        return {}
    for scope in (flash.SCOPE, grouped.SCOPE):
        if scope in one.attributes:
            return {scope: 1}
    named = re.search(r'op_name="([^"]*)/pallas_call"', one.attributes)
    return {named[1].rpartition("/")[2] if named else re.sub(r"[.\d]+$", "", one.name): 1}
