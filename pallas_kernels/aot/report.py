"""The tables: the bytes that kernels move, next to those of XLA's compilation of the reference, and the assembler's
figures."""

import math
from collections.abc import Mapping, Sequence

from pallas_kernels.aot.cases import COMPARED, FACTS, FACTS_OF, TABLE, Case
from pallas_kernels.aot.targets import TARGETS
from pallas_kernels.launch import Launch
from pallas_kernels.launch.mosaic_gpu import CUDA_BYTES, MULTIPROCESSORS, REGISTERS, SHARED_BYTES
from pallas_kernels.ops import LAUNCHERS, add_rms_norm, nag_update, review_update

KERNELS = {m.OP.name: (m.FORWARD, m.BACKWARD) for m in (add_rms_norm, nag_update, review_update)}

THREADS = 2048  # of a multiprocessor

# The chips that the README shows.
SHOWN = ("v5e", "h200")


def inserted(page: str, results: Mapping[tuple[str, Case], dict]) -> str:
    """The page with both tables between their marks, for the chips that the page shows. Raises ValueError for a page
    without the marks."""
    for name, table in _tables(results).items():
        mark = f"<!-- aot: {name} -->\n"
        if page.count(mark) != 1:
            raise ValueError(f"the page has {page.count(mark)} marks {mark.strip()}; accepted: one")
        before, after = page.split(mark)
        page = before + mark + table + "\n" + after[after.index("<!-- end -->") :]
    return page


def outdated(page: str, results: Mapping[tuple[str, Case], dict]) -> list[str]:
    """The lines of the new tables that the page lacks, or whose figures differ there by more than 2% and 2 units."""
    lines = [line for table in _tables(results).values() for line in table.splitlines()[2:]]
    known = {tuple(cells[:3]): cells[3:] for cells in map(_cells, page.splitlines())}
    return [line for line in lines if not _alike(_cells(line)[3:], known.get(tuple(_cells(line)[:3]), []))]


def _tables(results: Mapping[tuple[str, Case], dict]) -> dict[str, str]:
    shown = {key: result for key, result in results.items() if key[0] in SHOWN}
    return {"bytes": markdown(shown), "facts": facts(shown)}


def _cells(line: str) -> list[str]:
    return line.strip(" |").split(" | ")


def _alike(ours: Sequence[str], theirs: Sequence[str]) -> bool:
    def close(a, b):
        return a == b or ("-" not in (a, b) and math.isclose(float(a), float(b), rel_tol=0.02, abs_tol=2))

    return len(ours) == len(theirs) and all(map(close, ours, theirs))


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

        kernel = TARGETS[target].best
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


def facts(results: Mapping[tuple[str, Case], dict]) -> str:
    """The assembler's figures of the kernels, in Markdown, for both backends: registers per thread, spilled bytes per
    thread, threads per multiprocessor, and the most KB of rows that these have in flight."""
    lines = [
        "| op | pass | width | "
        + " | ".join(f"{name}: registers | spilled | threads | KB" for name in COMPARED)
        + " |",
        "|---" * (3 + 4 * len(COMPARED)) + "|",
    ]
    found = {(c.op, c.verb, c.rows, c.width, c.dtype) for (t, c), r in results.items() if "registers" in r}
    for op, verb, *shape in sorted(k for k in found if k[2:] in TABLE + FACTS and k[0] in KERNELS):
        cells = []
        for name in COMPARED:
            result = results.get((FACTS_OF, Case(op, name, verb, *shape)), {})
            if "registers" not in result:
                cells += "-" * 4
                continue
            registers, spilled = result["registers"], result["spilled"]
            launch = LAUNCHERS[name].launched(KERNELS[op][verb == "backward"], *shape)
            programs = resident(registers, launch)
            kilobytes = programs * launch.ahead / 1024
            cells += [registers, spilled, programs * launch.threads, f"{kilobytes:.0f}"]
        lines.append(f"| {op} | {verb} | {shape[1]} | {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def resident(registers: int, launch: Launch) -> int:
    """The number of programs that a multiprocessor runs at a time. Registers are allocated to warps, 256 at a time."""
    warp = math.ceil(registers * 32 / 256) * 256
    shared = launch.shared + CUDA_BYTES
    started = math.ceil(launch.programs / MULTIPROCESSORS)
    return min(REGISTERS // (warp * launch.threads // 32), THREADS // launch.threads, SHARED_BYTES // shared, started)


def _sum(a: int | None, b: int | None) -> int | None:
    return a + b if a and b else None


def _mega(value: int | None) -> str:
    return f"{value / 1e6:.0f}" if value else "-"


def _ratio(value: int | None, base: int | None) -> str:
    return f"{value / base:.2f}" if value and base else "-"
