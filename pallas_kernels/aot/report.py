"""The bytes table: what the kernels move, compared with XLA's compilation of the reference."""

from __future__ import annotations

from collections.abc import Mapping

from pallas_kernels.aot.cases import TABLE, Case
from pallas_kernels.aot.targets import TARGETS

KERNEL = {"tpu": "mosaic_tpu", "cuda": "pallas_triton"}


def markdown(results: Mapping[tuple[str, Case], dict]) -> str:
    """The table in Markdown, one line per op, shape and target: MB of main memory read and written.

    `results` maps (target, case) to figures. "with backward" is the forward pass that saves residuals plus the
    backward pass; `xla` is the hand-written backward pass compiled by XLA. A case that is missing or failed
    shows as a dash.
    """
    lines = [
        "| op | rows x width | target | forward: reference | kernel | ratio "
        "| with backward: reference | xla | kernel | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    measured = {(c.op, c.rows, c.width, c.dtype, t) for (t, c), r in results.items() if "bytes" in r}
    for op, *shape, target in sorted(k for k in measured if k[1:4] in TABLE):

        def figure(name, verb, target=target, op=op, shape=shape):
            return results.get((target, Case(op, name, verb, *shape)), {}).get("bytes")

        kernel = KERNEL[TARGETS[target].platform]
        reference, fused = figure("reference", "forward"), figure(kernel, "forward")
        training = [
            _sum(figure(name, "saving" if name == "reference" else "forward"), figure(name, "backward"))
            for name in ("reference", "xla", kernel)
        ]
        cells = [_mega(reference), _mega(fused), _ratio(fused, reference)]
        cells += [*map(_mega, training), _ratio(training[2], training[0])]
        rows, width, dtype = shape
        lines.append(f"| {op} | {rows} x {width} {dtype} | {target} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _sum(a: int | None, b: int | None) -> int | None:
    return a + b if a and b else None


def _mega(value: int | None) -> str:
    return f"{value / 1e6:.0f}" if value else "-"


def _ratio(value: int | None, base: int | None) -> str:
    return f"{value / base:.2f}" if value and base else "-"
