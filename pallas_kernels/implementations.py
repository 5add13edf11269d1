"""The implementation that every op uses on every platform, and why not others, as `nagjax info --kernels` shows it."""

from typing import NamedTuple

from pallas_kernels.dispatch import PLATFORMS, choose, preferred
from pallas_kernels.ops import all_ops
from pallas_kernels.shapes import sample


class Row(NamedTuple):
    """One op of the table: its implementation on each platform, and every refusal."""

    op: str
    chosen: dict[str, str | None]
    refusals: dict[str, str]


def choices(rows: int = 16384, width: int = 2048, dtype: str = "bfloat16") -> list[Row]:
    """For every op, at rows `[rows, width]` of `dtype`, the implementation that implementation=None (or `using`)
    chooses."""
    table = []
    for name, op in all_ops().items():
        of = sample(name, rows, width, dtype)
        choice = choose(op, preferred(), *of.args, **of.constants)
        table.append(Row(name, dict(zip(PLATFORMS, choice.names, strict=True)), dict(choice.refusals)))
    return table


def table(rows: int = 16384, width: int = 2048, dtype: str = "bfloat16") -> str:
    """`choices` as a text table, followed by the reasons."""
    found = choices(rows, width, dtype)
    lines = [f"{'[' + str(rows) + ', ' + str(width) + '] ' + dtype:24}" + "".join(f"{p:15}" for p in PLATFORMS)]
    lines += [f"{row.op:24}" + "".join(f"{row.chosen[p] or '-':15}" for p in PLATFORMS) for row in found]
    reasons = {}
    for row in found:
        for name, why in row.refusals.items():
            if not why.startswith("runs on"):  # the columns already show that
                reasons.setdefault((name, why), []).append(row.op)
    lines += [f"{name}: {why} ({', '.join(ops)})" for (name, why), ops in reasons.items()]
    return "\n".join(line.rstrip() for line in lines)
