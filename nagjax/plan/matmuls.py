"""FLOPs of matmuls in a compiled program, in all the forms in which compilers write them."""

import math
import re

import numpy as np

from nagjax.json_reader import parse_json
from nagjax.layers import flash, grouped
from pallas_kernels.hlo import Computation, Instruction, arrays

# Matmuls of the splash attention kernels. Forward: scores, and mixing of values. Backward: each kernel computes the
# scores and their gradient, and one matmul for each gradient that it returns.
SPLASH = {"splash_mha_fwd": 2, "splash_mha_dkv": 4, "splash_mha_dq": 3}
# The same for tokamax's kernels, one of which does the whole backward pass; and the size of their tiles, in tokens.
FLASH = {"pallas_flash_attention": 2, "pallas_flash_attention_fwd_res": 2, "pallas_flash_attention_vjp": 7}
TILE = 64
# Names of kernels for grouped matmuls: those that a TPU's compiler makes, and tokamax's.
GROUPED = re.compile(rf"^ragged-dot-(?!metadata)|{grouped.SCOPE}\S*/triton_kernel_call")


def flops_of(one: Instruction, home: Computation) -> float:
    """FLOPs of an instruction: 2 per multiply-add of a matmul, 0 for anything else."""
    if one.opcode == "ragged-dot":
        return _ragged(one, home)
    if one.opcode == "dot":
        lhs = _shape(home, one.operands[0])
        contracted = _numbers(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
        return 2.0 * _elements(one.type) * math.prod(lhs[d] for d in contracted)
    if one.opcode == "convolution":
        return _convolution(one, home)
    if one.opcode == "custom-call":
        if "__cublas$" in one.attributes:
            return _cublas(one, home)
        if GROUPED.search(one.name + one.attributes):
            return _grouped(one, home)
        for name in SPLASH:
            if name in one.name:
                return _splash(one, home, name)
        if flash.SCOPE in one.attributes and "mosaic_gpu" in one.attributes:
            return _hopper_matmuls(one, home) * _flash_matmul(one, home)
        for name, matmuls in FLASH.items():
            if re.search(rf"\b{name}\)*/", one.attributes):
                return matmuls * _flash_matmul(one, home)
    return 0.0


def _ragged(one: Instruction, home: Computation) -> float:
    """FLOPs of a ragged matmul, whose rows are in groups with one matrix per group; every row counts as if it were in a
    group. If the sum is over rows (for a gradient of the matrices), each row is multiplied for its own group only."""
    contracted = _numbers(r"lhs_contracting_dims=\{([\d,]*)\}", one.attributes)
    work = 2.0 * _elements(one.type) * math.prod(_shape(home, one.operands[0])[d] for d in contracted)
    summed = set(_numbers(r"lhs_ragged_dims=\{([\d,]*)\}", one.attributes)) <= set(contracted)
    return work / math.prod(_shape(home, one.operands[2])) if summed else work


def _grouped(one: Instruction, home: Computation) -> float:
    """FLOPs of a kernel for a grouped matmul. Its first operand with two dimensions is [N, m]. Every row meets weights
    [m, n], or, for the gradient of the matrices, adds [m, n] to its group's."""
    rows = next(shape for shape in (_shape(home, o) for o in one.operands) if len(shape) == 2)
    return 2.0 * math.prod(rows) * arrays(one.type)[0][1][-1]


def _convolution(one: Instruction, home: Computation) -> float:
    """FLOPs of a convolution. Only multiply-adds with an element of the input count, not those with padding or with the
    zeros that dilation inserts."""
    (lhs, rhs), out = (_shape(home, o) for o in one.operands[:2]), arrays(one.type)[0][1]
    lhs_labels, rhs_labels, out_labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", one.attributes).groups()
    window = re.search(r"window=\{([^}]*)\}", one.attributes)
    window = dict(re.findall(r"(\w+)=(\S+)", window[1])) if window else {}
    groups = re.search(r"batch_group_count=(\d+)", one.attributes)
    work = rhs[rhs_labels.index("i")] * out[out_labels.index("f")] * lhs[lhs_labels.index("b")]
    work /= int(groups[1]) if groups else 1
    for axis in range(sum(label.isdigit() for label in lhs_labels)):
        work *= _positions(
            given=lhs[lhs_labels.index(str(axis))],
            kernel=rhs[rhs_labels.index(str(axis))],
            out=out[out_labels.index(str(axis))],
            stride=_entry(window, "stride", axis),
            padding=int(window["pad"].split("x")[axis].split("_")[0]) if "pad" in window else 0,
            base=_entry(window, "lhs_dilate", axis),
            spread=_entry(window, "rhs_dilate", axis),
        )
    return 2.0 * work


def _positions(given: int, kernel: int, out: int, stride: int, padding: int, base: int, spread: int) -> int:
    """The number of pairs of output and kernel positions that use an element of the input."""
    met = 0
    for k in range(kernel):
        at = np.arange(out) * stride + k * spread - padding
        met += int(np.sum((at >= 0) & (at % base == 0) & (at // base < given)))
    return met


def _entry(window: dict[str, str], name: str, axis: int) -> int:
    return int(window[name].split("x")[axis]) if name in window else 1


def _cublas(one: Instruction, home: Computation) -> float:
    start = one.attributes.find("backend_config=")
    found = re.search(r'"lhs_contracting_dimensions":(\[[^\]]*\])', one.attributes[start:])
    if start < 0 or not found:
        return 0.0
    lhs = _shape(home, one.operands[0])
    return 2.0 * math.prod(arrays(one.type)[0][1]) * math.prod(lhs[int(d)] for d in parse_json(found[1]))


def _splash(one: Instruction, home: Computation, kernel: str) -> float:
    """FLOPs of the matmuls of queries with keys, for the blocks on and below the diagonal of every row of keys. If
    there are fewer queries than keys, because they are a part of the row or chosen from it, they are assumed to be
    spread over it."""
    names = {"splash_mha_fwd": ("block_q", "block_kv")}
    names |= {"splash_mha_dkv": ("block_q_dkv", "block_kv_dkv"), "splash_mha_dq": ("block_q_dq", "block_kv_dq")}
    shapes = [_shape(home, o) for o in one.operands]
    places = [i for i, (q, k, v) in enumerate(zip(shapes, shapes[1:], shapes[2:], strict=False)) if _attended(q, k, v)]
    if not places:
        return 0.0
    (queries, keys), ahead = shapes[places[0] : places[0] + 2], shapes[: places[0]]
    sizes = [re.search(rf'\\?"{name}\\?": (\d+)', one.attributes) for name in names[kernel]]
    rows, columns = (int(s[1]) if s else keys[-2] for s in sizes)
    # For rows that are joined end to end, the table of blocks contains no pair of one row's queries with another's
    # keys.
    table = next((s for s in ahead if len(s) >= 3), None)
    apart = queries[-2] * keys[-2] // (math.prod(table[-2:]) * rows * columns) if table else 1
    tokens = keys[-2] // max(apart, 1)
    visited = sum(min(math.ceil((i + 1) * rows / columns), tokens // columns) for i in range(tokens // rows))
    # A kernel that returns all three gradients has those of the queries in parts, along an additional axis.
    matmuls = SPLASH[kernel] + any(len(shape) > len(queries) for _, shape, _ in arrays(one.type))
    return matmuls * 2.0 * math.prod(queries) * visited * rows * columns / tokens


def _attended(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> bool:
    """Whether these shapes can be queries, keys and values: equal numbers of features, and heads of keys that queries
    share."""
    alike = len(q) == len(k) >= 3 and k == v and (*q[:-3], q[-1]) == (*k[:-3], k[-1])
    return alike and q[-3] % k[-3] == 0


def _hopper_matmuls(one: Instruction, home: Computation) -> int:
    """The number of matmuls that a kernel of `nagjax.layers.flash` for Hopper computes. Forward there is one kernel.
    Backward, where kernels also read the gradient of the result, there is one for queries, and one with two results for
    keys and values."""
    shapes = [_shape(home, operand) for operand in one.operands]
    alike = [s for s in shapes if len(s) == len(shapes[0]) and s[-1] == shapes[0][-1]]
    return 2 if len(alike) == 3 else 3 + (len(arrays(one.type)) == 2)


def _flash_matmul(one: Instruction, home: Computation) -> float:
    """FLOPs of one [Tq, Tk] x Dh matmul per head. If there are as many queries as keys, only tiles on and below the
    diagonal count."""
    *batch, queries, heads, features = _shape(home, one.operands[0])
    keys = _shape(home, one.operands[1])[-3]
    visited = queries * (keys + min(TILE, keys)) / 2 if queries == keys else queries * keys
    return 2.0 * math.prod(batch) * heads * visited * features


def _shape(home: Computation, name: str) -> tuple[int, ...]:
    found = arrays(home.type_of(name))
    return found[0][1] if found else ()


def _elements(type_text: str) -> int:
    return math.prod(arrays(type_text)[0][1])


def _numbers(pattern: str, text: str) -> list[int]:
    found = re.search(pattern, text)
    return [int(n) for n in found[1].split(",") if n] if found else []
