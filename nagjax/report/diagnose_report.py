"""A diagnosis as one self-contained HTML page, and as JSON beside it."""

import json
from html import escape
from pathlib import Path

from nagjax.report.depth_figures import draw_diagnosis
from nagjax.report.labels import number
from nagjax.report.page import document, figure_html, write_files
from nagjax.report.plots import Plot
from nagjax.report.verdict_depth import RISE, USED
from nagjax.runs.names import DIAGNOSIS, DIAGNOSIS_DATA


def write_diagnosis(record: dict, folder: str | Path) -> Path:
    """Writes diagnosis.html and diagnosis.json into `folder`, and returns the page's path. The same record gives the
    same bytes. Raises UserError if the folder cannot be written."""
    folder = Path(folder)
    page = diagnosis_page(record, draw_diagnosis(record))
    write_files(folder, {DIAGNOSIS_DATA: json.dumps(record).encode(), DIAGNOSIS: page.encode()})
    return folder / DIAGNOSIS


def diagnosis_page(record: dict, plots: list[Plot]) -> str:
    """One HTML page with inline style and figures."""
    skips, curve = record["skips"], record["curve"]
    title = f"Inside {record['title']}, {record['depth']} blocks x {record['width']}"
    told = (
        f"{escape(record['run'])}{_trained(record)}; measured on {record['tokens']:,} validation tokens, "
        f"loss {record['loss']:.4f} nats per token; without single blocks on {skips['tokens']:,}, where that of the "
        f"whole model is {skips['loss']:.4f}; without several on {curve['batches']} batches, where it is "
        f"{curve['loss']:.4f}. Blocks count from 1{_left(record)}. A block is used if its absence alone costs "
        f"{USED:g} nats per token; blocks could go if together they cost at most {RISE:g}. No retraining anywhere. "
        "One model and one text: how much of this is chance was not measured."
    )
    parts = [f"<h1>{escape(title)}</h1>", f'<p class="verdict">{escape(record["verdict"])}</p>', f"<p>{told}</p>"]
    parts += map(figure_html, plots)
    parts += ["<h2>Block by block</h2>", _table(record)]
    parts.append(f'<p class="quiet">All numbers, with their matrices, are in {DIAGNOSIS_DATA} beside this page.</p>')
    return document(title, parts)


def _trained(record: dict) -> str:
    """How long the model was trained; unknown for a model that was trained elsewhere."""
    return f", after {record['step']:,} steps" if record["step"] else ""


def _left(record: dict) -> str:
    return ", among those that an earlier removal has left" if record["kept"] else ""


def _table(record: dict) -> str:
    blocks, skips = record["blocks"], record["skips"]
    columns = {
        "loss added without it": skips["added_loss"],
        "effect on the output": skips["output_effect"],
        "influence": [value[0] for value in blocks["influence"]],
        "contribution": [value[0] for value in blocks["contribution"]],
        "cosine": [value[0] for value in blocks["cosine"]],
        "Jacobian to identity": blocks["jacobian"],
        "sink heads": record["attention"]["sinks"],
    }
    columns = {name: values for name, values in columns.items() if values is not None}
    names = ("block", *(["before the removal"] if record["kept"] else []), *columns)
    head = "".join(f"<th>{escape(name)}</th>" for name in names)
    rows = "".join(
        f"<tr><th>{block + 1}</th>"
        + (f"<td>{record['kept'][block] + 1}</td>" if record["kept"] else "")
        + "".join(f"<td>{number(values[block], 4)}</td>" for values in columns.values())
        + "</tr>"
        for block in range(record["depth"])
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
