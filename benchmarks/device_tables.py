"""Tables of what `benchmarks/device.py` has measured, into the pages that show them.

    python benchmarks/device_tables.py [--check]

Reads benchmarks/results/device/MACHINE/PART.jsonl and rewrites what stands between `<!-- device: TABLE -->` and
`<!-- end -->` in the pages. What was measured on another device, with other versions or at another commit has a table
of its own. A table without figures says that nothing was measured. `--check` writes nothing and fails where a page is
not what it would write.
"""

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.parts.rows import REHEARSAL, measured  # noqa: E402
from benchmarks.plan_tables import table as _table  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results" / "device"
PAGES = ("README.md", "pallas_kernels/README.md", "docs/hardware.md")
NOTHING = "Not measured on any device yet: `python benchmarks/device.py --part {part} --out FOLDER` does it."
TOLD = ("jax", "nvidia-cudnn-cu13", "libtpu", "torch", "triton", "tokamax")  # versions in the heading of a table
MARKED = re.compile(r"(<!-- device: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def values(rows: list[dict]) -> str:
    """The number of programs whose results were right, and the worst error in units of the tolerance, by op and
    implementation."""
    return _grouped(
        rows,
        ("op", "implementation"),
        ("programs", "within the tolerance", "worst error / tolerance"),
        lambda own: (
            str(len(own)),
            str(sum(r["result"]["worst"] <= 1.0 for r in own if "result" in r)),
            f"{max((r['result']['worst'] for r in own if 'result' in r), default=float('nan')):.2f}",
        ),
    )


def kernels(rows: list[dict]) -> str:
    """Microseconds, share of the copy bandwidth, and time relative to XLA's fusion, by op, width and implementation."""
    lines = []
    for row in rows:
        case = row["case"]
        op = case["op"] + (", in place" if case.get("donated") else "")
        shape = f"{case['rows']} x {case['width']} {case['dtype']}"
        if "result" not in row:
            lines.append((op, shape, case.get("implementation", "peers"), "failed", "-", "-", "-"))
            continue
        for implementation, passes in row["result"]["implementations"].items():
            for what, own in passes.items():
                if what == "forward+backward":
                    continue
                share = f"{own['of_copy']:.0%}" if own.get("of_copy") else "-"
                ratio = f"{own['vs_reference']:.2f}" if own.get("vs_reference") else "-"
                time = f"{own['us']:.1f}" + (" with the host's" if own.get("host_time") else "")
                lines.append((op, shape, implementation, what, time, share, ratio))
        if "error_backward" in row["result"]:
            lines.append((op, shape, case["implementation"], "backward", "failed", "-", "-"))
    copies = [row["result"]["copy_GB/s"] for row in rows if "copy_GB/s" in row.get("result", {})]
    share = f"of a copy's {statistics.median(copies):.0f} GB/s" if copies else "of a copy's GB/s"
    return _table(("op", "rows", "implementation", "pass", "µs", share, "time / XLA's fusion"), lines)


def steps(rows: list[dict]) -> str:
    """Step time, MFU and memory by size, rematerialisation, kernels and scheme, relative to plain with the same
    settings in the same process, because another start may have been on another machine. The peak for MFU is that of a
    matrix product in the same process; MFU by the data sheet's peak is in brackets."""
    lines = []
    for row in rows:
        if "result" not in row:
            continue
        case, found = row["case"], row["result"]
        ratio, of_sheet = found["vs_base"], found["mfu_of_data_sheet"]
        lines.append(
            (
                case["size"],
                case["remat"],
                case["kernels"],
                case["scheme"],
                f"{found['milliseconds']:.1f}",
                f"{ratio['milliseconds']:.3f}" if ratio else "-",
                f"{found['matmul_flops'] / 1e12:.0f}",
                f"{found['mfu']:.1%}" + (f" ({of_sheet:.1%})" if of_sheet else ""),
                _gib(found["temporary_bytes"]),
            )
        )
    figures = ("ms per step", "/ plain", "peak, TFLOP/s", "MFU", "temporary memory")
    return _table(("size", "remat", "kernels", "scheme", *figures), lines)


def attention(rows: list[dict]) -> str:
    """Time, and the worst error of output and gradients, by shape and implementation."""
    return _compared(rows, {"B x T x H x Dh": _shape, "documents a row": lambda case: str(case["documents"])})


def experts(rows: list[dict]) -> str:
    """Time, and the worst error, of the matmuls of dropless experts and their gradients."""
    return _compared(rows, {"rows x experts x m x n": _shape})


def _compared(rows: list[dict], columns: dict[str, Callable[[dict], str]]) -> str:
    """A table of implementations: columns that name the case, then milliseconds and the worst error."""
    lines = []
    for row in rows:
        if "result" in row:
            case, found = row["case"], row["result"]
            worst = max(value for name, value in found.items() if name.startswith("error"))
            figures = case["implementation"], f"{found['milliseconds']:.3f}", f"{worst:.1e}"
            lines.append((*(show(case) for show in columns.values()), *figures))
    return _table((*columns, "implementation", "ms, both passes", "worst relative error"), lines)


def _shape(case: dict) -> str:
    return " x ".join(map(str, case["shape"]))


def mod(rows: list[dict]) -> str:
    """Time saved relative to FLOPs saved by Mixture-of-Depths, compared with the dense step of the same process."""
    lines = []
    for row in rows:
        case = row["case"]
        if "result" in row and case["rate"]:
            figures = ("-",) * 3
            if ratio := row["result"]["vs_base"]:
                time, flops = ratio["milliseconds"], ratio["flops_per_step"]
                figures = f"{time:.3f}", f"{flops:.3f}", f"{(1 - time) / (1 - flops):.2f}"
            lines.append((case["size"], case["scheme"], f"{case['rate']:.0%}", *figures))
    header = ("size", "scheme", "tokens skipped", "time / dense", "FLOPs / dense", "time saved / FLOPs saved")
    return _table(header, lines)


def training(rows: list[dict]) -> str:
    """Validation loss of the first trainings."""
    lines = []
    for row in rows:
        if "result" in row:
            found = row["result"]
            figures = f"{found['tokens'] / 1e6:.1f} M", f"{found['loss']:.4f}", f"{found['bits_per_byte']:.4f}"
            lines.append((row["case"]["size"], row["case"]["scheme"], *figures))
    return _table(("blocks x width", "scheme", "tokens", "validation loss, nats", "bits per byte"), lines)


def profile(rows: list[dict]) -> str:
    """Share of a step's device time by part of the model; `named` is the share of the step's time that all these parts
    cover."""
    good = [row for row in rows if "result" in row]
    names = sorted({name for row in good for name in row["result"]["scopes"]})
    lines = []
    for row in good:
        scopes = row["result"]["scopes"]
        total = sum(scopes.values())
        named = f"{total / row['result']['milliseconds']:.0%}"
        shares = (f"{scopes.get(n, 0) / total:.0%}" for n in names)
        lines.append((row["case"]["size"], row["case"]["scheme"], named, *shares))
    return _table(("size", "scheme", "named", *names), lines)


TABLES: dict[str, Callable[[list[dict]], str]] = {
    f.__name__: f for f in (values, kernels, steps, attention, experts, mod, training, profile)
}


def render(name: str, results: Path) -> str:
    """One table for all figures of the part with the same device, versions and commit, for the files of all
    machines."""
    parts = []
    for path in sorted(results.glob(f"*/{name}.jsonl")):
        if path.parent.name == REHEARSAL:
            continue
        groups: dict[str, list[dict]] = {}
        for row in measured(path):
            origin = json.dumps([row["origin"][of] for of in ("device", "versions", "commit")], sort_keys=True)
            groups.setdefault(origin, []).append(row)
        parts += [_part(name, path, rows) for rows in groups.values()]
    return "\n\n".join(parts) or NOTHING.format(part=name)


def _part(name: str, path: Path, rows: list[dict]) -> str:
    """The table below a heading that says what it was measured on; no table if every case failed."""
    where, days = rows[-1]["origin"], sorted({row["origin"]["date"][:10] for row in rows})
    with_packages = "".join(f", {name} {has}" for name, has in where["versions"].items() if name in TOLD and has)
    of_days = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    said = f"{where['device']}{with_packages}, commit {where['commit']}, {of_days}."
    failed = sum("error" in row for row in rows)
    said += f" {failed} of {len(rows)} cases failed; {path.name} has their errors." if failed else ""
    by_xla = sum(row.get("result", {}).get("attention") == "xla" for row in rows)
    said += f" {by_xla} were measured with XLA's attention: that of auto failed." if by_xla else ""
    return said if failed == len(rows) else f"{said}\n\n{TABLES[name](rows)}"


def rewritten(page: str, results: Path) -> str:
    """The page with its tables made from the results."""
    return MARKED.sub(lambda m: f"{m[1]}{render(m[2], results)}\n{m[3]}", page)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--check", action="store_true", help="fail where a page is not up to date")
    given = parser.parse_args(argv)
    stale = 0
    for name in PAGES:
        path = ROOT / name
        old = path.read_text(encoding="utf-8")
        new = rewritten(old, RESULTS)
        if new != old:
            stale += 1
            print(f"{name}: {'not up to date' if given.check else 'written'}")
            if not given.check:
                path.write_text(new, encoding="utf-8")
    return 1 if given.check and stale else 0


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**30:.1f} GiB"


def _grouped(rows: list[dict], names: tuple[str, ...], header: tuple[str, ...], figures: Callable) -> str:
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault(tuple(row["case"][name] for name in names), []).append(row)
    return _table((*names, *header), [(*key, *figures(own)) for key, own in groups.items()])


if __name__ == "__main__":
    sys.exit(main())
