"""The comparison of runs as a table: for the terminal, in Markdown, and in HTML."""

import html
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Group
from rich.table import Table as RichTable
from rich.text import Text

from nagjax.console import visible
from nagjax.report.labels import NOT_MEASURED, count, factor, machine, number, rate, run_labels
from nagjax.report.verdict import one_text, same_text
from nagjax.runs.log import Run


@dataclass(frozen=True)
class Cell:
    """One entry; `best` marks the lowest of a quantity that is better when lower."""

    text: str
    best: bool = False


@dataclass(frozen=True)
class Table:
    """A row per run: `rows[i][j]` belongs under `columns[j]`, whose name carries the unit."""

    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]

    def __repr__(self) -> str:
        return to_markdown(self)

    def _repr_html_(self) -> str:
        return to_html(self)


def comparison_table(runs: Sequence[Run]) -> Table:
    """The facts of each run. The best values are marked, ties included: the step time if all runs used the same kind of
    machine, bits per byte if they share their text, and the validation loss if they share the tokenizer, too.

    The step time is also given as a ratio to that of the plain run, if there is one of the same shape and machine. Runs
    with Mixture-of-Depths are judged by their causal decider (`nagjax.runs.metrics.EvalLog`). Raises `UserError` for a
    run without an evaluation.
    """
    evaluations = [run.last_eval for run in runs]
    depth = [run.depth_facts for run in runs]
    one_machine = len({machine(run) for run in runs}) == 1
    step_ms = [None if run.step_seconds is None else 1000 * run.step_seconds for run in runs]
    columns: dict[str, list[Cell]] = {
        "scheme": [Cell(label) for label in run_labels(runs)],
        "depth (blocks)": [Cell(str(run.depth)) for run in runs],
        "parameters": [Cell(count(run.info["parameters"])) for run in runs],
        "training FLOPs/token": [Cell(count(run.info["train_flops_per_token"])) for run in runs],
        "learning rate": [Cell(rate(run.lr)) for run in runs],
        "step time (ms)": _marked(step_ms, lambda v: number(v, 0 if v is None or v >= 100 else 1), one_machine),
    }
    ratios = [step_time_ratio(run, runs) for run in runs]
    if any(ratio is not None for ratio in ratios):
        columns["step time / plain"] = [Cell(number(ratio, 2)) for ratio in ratios]
    skipped = [_skipped(run) for run in runs]
    if any(skipped):
        columns["skipped (token, sublayer) pairs"] = [Cell(f"{share:.1%}") for share in skipped]
    columns |= {
        "tokens": [Cell(count(e.tokens)) for e in evaluations],
        "validation loss (nats/token)": _marked([e.loss for e in evaluations], lambda v: number(v, 4), one_text(runs)),
    }
    top_k = [loss if (loss := run.evals.top_k_loss[-1]) == loss else None for run in runs]
    if any(loss is not None for loss in top_k):
        columns["the same by top-k, which looks ahead"] = [Cell(number(loss, 4)) for loss in top_k]
    bits = [None if e.bits_per_byte != e.bits_per_byte and e.loss == e.loss else e.bits_per_byte for e in evaluations]
    columns["bits per byte"] = _marked(bits, lambda v: number(v, 4), same_text(runs))
    answers = [run.task_scores for run in runs]
    for name in dict.fromkeys(name for scores in answers for name in scores):
        columns[f"task {name}"] = [Cell(number(scores.get(name), 4)) for scores in answers]
    columns |= {
        "residual growth, last/first block": [Cell(NOT_MEASURED if d is None else factor(d.growth)) for d in depth],
        "turn angle, last quarter (deg)": [
            Cell(NOT_MEASURED if d is None else number(d.late_turn_degrees, 1)) for d in depth
        ],
        "updates below 5% (of sublayers)": [
            Cell(NOT_MEASURED if d is None else f"{d.dead_gates}/{2 * run.depth}")
            for run, d in zip(runs, depth, strict=True)
        ],
    }
    return Table(tuple(columns), tuple(zip(*columns.values(), strict=True)))


def step_time_ratio(run: Run, runs: Sequence[Run]) -> float | None:
    """The step time divided by that of the first plain run with the same model, batch, mesh and machine; None if there
    is none. The plain run must be dense, but `run` may use routing."""

    def shape(r: Run) -> list:
        train = r.config.get("train", {})
        model = {name: value for name, value in r.config["model"].items() if name != "mod"}
        return [model, train.get("batch"), train.get("accumulate", 1), r.config.get("mesh"), machine(r)]

    plain = next((r for r in runs if r.scheme == "plain" and not _skipped(r) and shape(r) == shape(run)), None)
    if plain is None or plain.step_seconds is None or run.step_seconds is None:
        return None
    return run.step_seconds / plain.step_seconds


def _skipped(run: Run) -> float:
    """Share of the (token, sublayer) pairs that routing leaves out."""
    return (run.info.get("mod_rate") or {}).get("total", 0.0)


def to_rich(table: Table, width: int) -> Group:
    """The table for the terminal: a row per quantity, and as many runs side by side as fit into `width` characters."""
    names = [Text(visible(name)) for name in table.columns[1:]]
    first = max(map(len, table.columns))
    tables, rows = [], list(table.rows)
    while rows:
        out = RichTable(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
        out.add_column(table.columns[0], width=first)
        shown, left = [], width - first
        while rows and (not shown or _needed(rows[0]) + 3 <= left):
            left -= _needed(rows[0]) + 3
            shown.append(rows.pop(0))
        for row in shown:
            out.add_column(Text(visible(row[0].text)), width=_needed(row), justify="right", overflow="fold")
        for j, name in enumerate(names, start=1):
            out.add_row(name, *(_terminal(row[j]) for row in shown))
        tables += [out, Text()]
    return Group(*tables, Text("* lowest, where lower is better. n/m: not measured.", style="dim"))


def to_markdown(table: Table) -> str:
    """A Markdown table with a row per quantity, the best values in bold."""

    def line(texts):
        return "| " + " | ".join(re.sub(r"([\\<\[|])", r"\\\1", " ".join(text.split())) for text in texts) + " |"

    rule = line([":--"] + ["--:"] * len(table.rows))
    head, *lines = [
        line([name, *(f"**{row[j].text}**" if row[j].best else row[j].text for row in table.rows)])
        for j, name in enumerate(table.columns)
    ]
    return "\n".join([head, rule, *lines]) + "\n"


def to_html(table: Table) -> str:
    """An HTML table with a row per quantity, the best values in `<strong>`; every text escaped."""

    def line(j: int, tag: str) -> str:
        texts = [(html.escape(row[j].text), row[j].best) for row in table.rows]
        cells = [f"<{tag}><strong>{t}</strong></{tag}>" if best else f"<{tag}>{t}</{tag}>" for t, best in texts]
        return f"<tr><th>{html.escape(table.columns[j])}</th>{''.join(cells)}</tr>"

    body = "\n".join(line(j, "td") for j in range(1, len(table.columns)))
    return f"<table>\n<thead>{line(0, 'th')}</thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _marked(
    values: Sequence[float | None], write: Callable[[float | None], str], comparable: bool = True
) -> list[Cell]:
    """Cells in which the lowest value is marked, if the values are `comparable`; values written the same are equally
    good. A single run is not marked."""
    texts = [write(value) for value in values]
    measured = [
        (value, text) for value, text in zip(values, texts, strict=True) if value is not None and value == value
    ]
    best = min(measured)[1] if comparable and len(measured) > 1 else None
    return [Cell(text, best=text == best) for text in texts]


def _needed(row: Sequence[Cell]) -> int:
    """The number of characters that a run's column needs; its name may be broken between words."""
    words = row[0].text.split()
    return max(*map(len, words), *(len(_terminal(cell)) for cell in row[1:]))


def _terminal(cell: Cell) -> Text:
    # The star marks the best value even without colours; in front, it leaves the digits aligned.
    text = visible(cell.text)
    return Text("*" + text, style="bold green") if cell.best else Text(text)
