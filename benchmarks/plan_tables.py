"""Tables of plans in Markdown, and functions that insert them into a document."""

import re
from collections.abc import Iterable, Mapping, Sequence

from nagjax.plan.bill import ASSUMED_MFU, bill
from nagjax.plan.units import gigabytes, milliseconds, scaled


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def standard(results: Iterable[dict]) -> str:
    """A table with one line per model and machine."""
    head = (
        "model, machine, mesh, tokens/step, state, saved, peak of capacity, FLOP, moved, sent, step at least, bound by"
    )
    head += ", tokens/s/chip at most, MFU at most"
    return table(head.split(", "), map(_standard_row, results))


def _standard_row(result: dict) -> list[str]:
    memory = result["memory"]
    cells = [
        *_what(result),
        _mesh(result),
        f"{result['tokens_per_step'] / 1024:,.0f} Ki",
        gigabytes(memory["parameters"] + memory["optimizer"]),
        gigabytes(memory["saved"]),
        _peak(memory),
    ]
    if "bound" not in result:
        return cells + ["does not fit"] + ["-"] * 6
    bound = result["bound"]
    return cells + [
        scaled(result["flops"], "FLOP"),
        scaled(result["moved"], "B"),
        scaled(result["sent"], "B"),
        milliseconds(bound["seconds"]),
        bound["limit"] if result["fits"] else f"{bound['limit']} (does not fit)",
        f"{result['tokens_per_second_per_chip']:,.0f}",
        f"{result['highest_mfu']:.0%}",
    ]


def remat(results: Iterable[dict]) -> str:
    """A table with one line per remat policy: what it keeps, and what it recomputes."""
    results = list(results)
    least = min((r["flops"] for r in results if "flops" in r), default=1.0)
    head = "policy, saved for the backward pass, peak of capacity, matmuls, moved, step at least"
    rows = []
    for result in results:
        saved, on_host = (result["memory"].get(name) for name in ("saved", "saved_on_host"))
        host = f" and {gigabytes(on_host)} on the host" if on_host else ""
        cells = [f"`--remat {result['config']['model']['remat']}`", gigabytes(saved) + host]
        cells.append(_peak(result["memory"]))
        if "bound" in result:
            cells += [f"{scaled(result['flops'], 'FLOP')} ({result['flops'] / least:.2f}x)"]
            cells += [scaled(result["moved"], "B"), milliseconds(result["bound"]["seconds"])]
        else:
            cells += ["does not fit", "-", "-"]
        rows.append(cells)
    return table(head.split(", "), rows)


def bills(results: Iterable[dict], tokens_per_parameter: float) -> str:
    """A table with one line per model and machine that fits: time and cost of a training of `tokens_per_parameter`
    tokens per parameter."""
    head = f"model, machine, tokens, hours at {ASSUMED_MFU:.0%} MFU, chip-hours, hours at the bound, chip-hours"
    return table(head.split(", "), (_bill_row(own, tokens_per_parameter) for own in results if own["fits"]))


def _what(result: dict) -> tuple[str, str]:
    """The model and the machine, as cells."""
    return f"{result['label']} ({result['parameters'] / 1e9:.2f}B)", f"`{result['topology']}`"


def _bill_row(result: dict, tokens_per_parameter: float) -> list[str]:
    found = bill(result, tokens_per_parameter * result["parameters"])
    costs = (f"{found[name][part]:,.1f}" for name in ("assumed", "bound") for part in ("hours", "chip_hours"))
    return [*_what(result), f"{found['tokens'] / 1e9:,.1f}B", *costs]


def insert(document: str, name: str, text: str) -> str:
    """The document with the text between its two `<!-- name -->` marks replaced."""
    mark = f"<!-- {name} -->"
    pattern = re.compile(f"{re.escape(mark)}\n.*?{re.escape(mark)}", re.S)
    if len(pattern.findall(document)) != 1:
        raise ValueError(f"the document needs the mark {mark} exactly twice")
    return pattern.sub(lambda _: f"{mark}\n{text}\n{mark}", document)


def inserted(document: str, texts: Mapping[str, str]) -> str:
    """The document with each of these texts inserted between the marks of its name."""
    for name, text in texts.items():
        document = insert(document, name, text)
    return document


def _peak(memory: dict) -> str:
    if "peak" in memory:
        return f"{gigabytes(memory['peak'])} ({memory['peak'] / memory['capacity']:.0%})"
    if memory.get("needed"):
        return f"{gigabytes(memory['needed'])} needed of {gigabytes(memory['capacity'])}"
    return f"more than {gigabytes(memory['capacity'])}"


def _mesh(result: dict) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in result["mesh"].items() if size > 1) or "one"


def mebibytes(size: float) -> str:
    """Bytes in whole MiB."""
    return f"{size / 2**20:,.0f} MiB"
