"""Lays out a report as one self-contained HTML page, and as Markdown with its figures."""

import base64
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from nagjax.errors import UserError
from nagjax.files import write_bytes
from nagjax.report.plots import Plot
from nagjax.report.table import Table, to_html, to_markdown

_UNEQUAL = "Not a like-for-like comparison. Besides scheme and learning rate, the runs differ in:"

CSS = """
:root { color-scheme: light; --ink: #1f2328; --quiet: #636c76; --rule: #e3e6ea; --tint: #f6f8fa;
  --best: #0b6e4f; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 62rem; color: var(--ink); background: #fff;
  font: 16px/1.6 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.2; margin: 0 0 1rem; letter-spacing: -0.01em; }
h2 { font-size: 1.15rem; margin: 2.75rem 0 0.75rem; padding-top: 1.25rem; border-top: 1px solid var(--rule); }
h3 { font-size: 0.95rem; margin: 1.25rem 0 0.35rem; }
p, ul { max-width: 46rem; margin: 0.5rem 0; }
.verdict { font-size: 1.2rem; line-height: 1.5; }
.quiet, figcaption { color: var(--quiet); font-size: 0.9rem; }
.unequal { background: #fff8e6; border-left: 4px solid #d9a400; padding: 0.6rem 1rem; margin: 1rem 0;
  max-width: 46rem; overflow-wrap: anywhere; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 0.88rem; font-variant-numeric: tabular-nums; }
th, td { padding: 0.4rem 0 0.4rem 1.6rem; text-align: right; vertical-align: bottom; }
thead th { font-weight: 600; line-height: 1.3; border-bottom: 2px solid var(--rule); }
tbody th, thead th:first-child { font-weight: 400; color: var(--quiet); }
tbody tr + tr > * { border-top: 1px solid var(--rule); }
th:first-child { text-align: left; padding-left: 0; }
strong { color: var(--best); }
figure { margin: 1.5rem 0 2rem; }
img { display: block; width: 100%; max-width: 52rem; height: auto; }
figcaption { max-width: 46rem; margin-top: 0.4rem; }
pre { background: var(--tint); border-radius: 6px; padding: 0.8rem 1rem; margin: 0.35rem 0; overflow-x: auto;
  font: 0.85rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
.sample { white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; padding: 0.25rem 0; font-weight: 600; }
@media print { body { max-width: none; padding: 0; } figure, tr { break-inside: avoid; } }
"""


@dataclass(frozen=True)
class Report:
    """The content of a report, before it is laid out."""

    title: str
    verdict: str
    learning_rates: str
    notes: tuple[str, ...]
    unequal: tuple[str, ...]
    """Fields other than scheme and learning rate in which the runs differ."""
    table: Table
    plots: tuple[Plot, ...]
    samples: tuple[tuple[str, str], ...]
    events: tuple[str, ...]
    origin: tuple[str, ...]
    commands: tuple[str, ...]
    records: tuple[tuple[str, str], ...]
    """Run label, and its config and info as JSON."""


def write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Writes each file completely, or leaves the old one untouched. Raises UserError if one cannot be written."""
    for name, content in files.items():
        path = folder / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_bytes(path, content)
        except OSError as error:
            fix = f"cannot be written ({error.strerror}): give another folder"
            raise UserError("out", str(path), fix) from None


def html_page(report: Report) -> str:
    """One HTML page with inline style and figures; every text from the runs is escaped."""
    parts = [f"<h1>{escape(report.title)}</h1>", f'<p class="verdict">{escape(report.verdict)}</p>']
    parts.append(f"<p>{escape(report.learning_rates)}</p>")
    parts += [f"<p>{escape(note)}</p>" for note in report.notes]
    if report.unequal:
        parts.append(f'<div class="unequal">{_UNEQUAL}{_items(report.unequal)}</div>')
    parts += ["<h2>Side by side</h2>", f'<div class="scroll">\n{to_html(report.table)}\n</div>', _legend("p")]
    parts += ["<h2>Figures</h2>"] if report.plots else []
    parts += map(figure_html, report.plots)
    parts += ["<h2>What they write</h2>"] if report.samples else []
    for label, text in report.samples:
        parts.append(f'<h3>{escape(label)}</h3>\n<pre class="sample">{escape(text)}</pre>')
    if report.events:
        parts += ["<h2>What happened on the way</h2>", _items(report.events)]
    commands = escape("\n".join(report.commands))
    parts += ["<h2>Go on</h2>", f"<pre>{commands}</pre>"]
    parts += ["<h2>Where the numbers come from</h2>", _items(report.origin)]
    for label, record in report.records:
        parts.append(f"<details><summary>{escape(label)}</summary>\n<pre>{escape(record)}</pre></details>")
    return document(report.title, parts)


def figure_html(plot: Plot) -> str:
    """The figure with its caption."""
    data, caption = base64.b64encode(plot.png).decode("ascii"), escape(plot.caption)
    image = f'<img src="data:image/png;base64,{data}" alt="{caption}">'
    return f'<figure id="{plot.name}">{image}<figcaption>{caption}</figcaption></figure>'


def document(title: str, parts: Sequence[str]) -> str:
    """A page from these pieces of HTML, in the style of all pages; `title` is plain text, which is escaped."""
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        + "\n".join(parts)
        + "\n</body>\n</html>\n"
    )


def markdown_page(report: Report, figures: str) -> str:
    """The report as Markdown, with links to the figures in the folder `figures` beside it."""
    parts = [f"# {_plain(report.title)}", f"**{_plain(report.verdict)}**", _plain(report.learning_rates)]
    parts += [_plain(note) for note in report.notes]
    if report.unequal:
        parts += [f"> {_UNEQUAL}\n>\n" + "\n".join(f"> - {_plain(line)}" for line in report.unequal)]
    parts += ["## Side by side", to_markdown(report.table).strip(), _legend("")]
    parts += ["## Figures"] if report.plots else []
    for plot in report.plots:
        parts += [f"![{plot.name}]({figures}/{plot.name}.png)", _plain(plot.caption)]
    parts += ["## What they write"] if report.samples else []
    for label, text in report.samples:
        parts += [f"### {_plain(label)}", _fenced(text)]
    if report.events:
        parts += ["## What happened on the way", "\n".join(f"- {_plain(line)}" for line in report.events)]
    parts += ["## Go on", _fenced("\n".join(report.commands), "sh")]
    parts += ["## Where the numbers come from", "\n".join(f"- {_plain(line)}" for line in report.origin)]
    for label, record in report.records:
        block = _fenced(record, "json")
        parts.append(f"<details><summary>{escape(label)}</summary>\n\n{block}\n\n</details>")
    return "\n\n".join(parts) + "\n"


def _legend(tag: str) -> str:
    text = (
        "Best values are bold where lower is better. n/m: not measured. Residual growth: RMS of the stream "
        "after the last block over that after the first. Updates below 5%: sublayers whose update is, on "
        "average, shorter than 0.05 of the stream, or not a number."
    )
    return f'<{tag} class="quiet">{text}</{tag}>' if tag else text


def _items(lines: tuple[str, ...]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>"


def _plain(text: str) -> str:
    """Escapes a text so that Markdown shows it as it is."""
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", text)


def _fenced(text: str, language: str = "text") -> str:
    """A code block whose fence is longer than any run of backticks inside."""
    longest = max((len(found) for found in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text.rstrip()}\n{fence}"
