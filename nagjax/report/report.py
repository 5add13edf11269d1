"""Writes one comparison into a folder: `report.html`, which is self-contained, and `report.md` with figures."""

import json
import math
import shlex
from collections.abc import Collection, Sequence
from pathlib import Path

from nagjax.errors import UserError
from nagjax.files import has_file, read_bytes, refuse_link
from nagjax.report.labels import listing, machine, run_labels
from nagjax.report.page import Report, html_page, markdown_page, write_files
from nagjax.report.plots import FIGURES as PLOTS
from nagjax.report.plots import Plot, draw_plots
from nagjax.report.table import comparison_table
from nagjax.report.verdict import differences, learning_rates, ranking, verdict
from nagjax.runs.log import Run
from nagjax.runs.names import MAP

FIGURES = "figures"
"""Folder of the PNGs, beside the report."""
PAGE = "report.html"
LARGEST_MAP = 1 << 26  # bytes of a picture in a run's folder


def write_report(runs: Sequence[Run], folder: str | Path, title: str, notes: Sequence[str] = ()) -> Path:
    """Writes `report.html`, `report.md` and `figures/*.png` into `folder`, and returns the path of the HTML page.

    `notes` are paragraphs of plain text below the verdict. The same runs give the same bytes. Raises `UserError`
    without runs, for a run without an evaluation, and if the folder cannot be written.
    """
    return save_report(build_report(runs, title, notes), folder)


def save_report(report: Report, folder: str | Path) -> Path:
    """Lays out the report and writes its files into `folder`; returns the path of the HTML page."""
    folder = Path(folder)
    refuse_link(folder / FIGURES)
    files = {f"{FIGURES}/{plot.name}.png": plot.png for plot in report.plots}
    files["report.md"] = markdown_page(report, FIGURES).encode(errors="replace")
    files[PAGE] = html_page(report).encode(errors="replace")
    if has_file(folder / PAGE):
        _forget(folder / FIGURES, {plot.name for plot in report.plots})
    write_files(folder, files)
    return folder / PAGE


def _forget(figures: Path, names: Collection[str]) -> None:
    """Removes the figures of an earlier report in the same folder, except those with these names, which are written
    anew."""
    for path in (*(figures / f"{name}.png" for name in PLOTS), *figures.glob("map-*.png")):
        if path.stem not in names and not path.is_symlink():
            path.unlink(missing_ok=True)


def build_report(runs: Sequence[Run], title: str, notes: Sequence[str] = ()) -> Report:
    """The content of the report, computed from the runs."""
    if not runs:
        raise UserError("runs", [], "a report needs at least one run")
    labels = run_labels(runs)
    pairs = list(zip(labels, runs, strict=True))
    return Report(
        title=title,
        verdict=verdict(runs),
        learning_rates=learning_rates(runs),
        notes=tuple(notes),
        unequal=tuple(differences(runs)),
        table=comparison_table(runs),
        plots=(*draw_plots(runs), *_maps(pairs)),
        samples=tuple((label, run.sample) for label, run in pairs if run.sample),
        events=tuple(f"{label}, step {e.step}: {e.message}" for label, run in pairs for e in run.events),
        origin=_origin(pairs),
        commands=_commands(runs),
        records=tuple(
            (label, json.dumps({"config": run.config, "info": run.info}, indent=2, sort_keys=True))
            for label, run in pairs
        ),
    )


def _maps(pairs: Sequence[tuple[str, Run]]) -> list[Plot]:
    """The depth maps that `nagjax map` has left in the runs' folders."""
    caption = "which sublayers each token of a text went through (white: skipped), coloured by how far they turned it"
    found = [
        (label, read_bytes(run.path / MAP, largest=LARGEST_MAP)) for label, run in pairs if has_file(run.path / MAP)
    ]
    return [Plot(f"map-{i}", f"{label}: {caption}.", png) for i, (label, png) in enumerate(found, 1)]


def _origin(pairs: Sequence[tuple[str, Run]]) -> tuple[str, ...]:
    """Where the runs were measured: one line for each distinct machine, versions, commit and day."""
    lines: dict[str, list[str]] = {}
    for label, run in pairs:
        info = run.info
        versions = ", ".join(f"{name} {version}" for name, version in sorted(info.get("versions", {}).items()))
        line = "; ".join(
            [
                machine(run),
                versions or "versions not recorded",
                f"commit {info.get('commit') or 'not recorded'}",
                str(info.get("date", "date not recorded"))[:10],
            ]
        )
        lines.setdefault(line, []).append(label)
    if len(lines) == 1:
        return tuple(lines)
    return tuple(f"{listing(labels)}: {line}" for line, labels in lines.items())


def _commands(runs: Sequence[Run]) -> tuple[str, ...]:
    """The commands to type next, with the runs as the user named them."""
    paths = [shlex.quote(str(run.path)) for run in runs]
    values, _ = ranking(runs)
    best = min(range(len(runs)), key=lambda i: values[i] if math.isfinite(values[i]) else math.inf)
    first = paths[best]
    commands = [f'nagjax generate {first} --prompt "def "', f"nagjax eval {first}", f"nagjax info {first}"]
    return tuple(commands + ([f"nagjax compare {' '.join(paths)}"] if len(paths) > 1 else []))
