"""experiments/README.md's table, a page per recipe, and the findings in the main README, made from docstrings, result
files and the log, nothing else.

`python -m experiments.harness.pages` writes them; with `--figures` it draws all figures again, and with `--summaries`
it first summarises all result files again, from the runs in them, by today's rules.
"""

import argparse
import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

from experiments.harness.evidence import budget, span
from experiments.harness.jobs import changed
from experiments.harness.recipe import HOME, Recipe, judged, load, names
from experiments.harness.results import plot_file, read_result, result_file, write_plot, write_summary
from experiments.harness.sweep import settings_from
from nagjax.errors import UserError
from nagjax.files import write_text
from nagjax.runs.config import nested

COLUMNS = ("claim", "verdict", "number", "seeds", "budget", "flags", "page")
BEGIN, END = "<!-- table: python -m experiments.harness.pages -->", "<!-- end of table -->"
COLUMN = {
    "lr x": "best factor on the scheme's default learning rate",
    "grid error": "how far, in nats, the best factor is above the minimum of a parabola through it and its neighbours",
    "per parameter": "tokens per parameter",
    "FLOPs": "training FLOPs over the reference's, as counted when it ran",
    "speed-up": "tokens of the reference over the arm's, to the final loss of the worse; it flatters early learners",
    "small updates": "sublayers, of two per block, whose updates are below 5% of the residual's length",
    "growth": "length of the residual behind the last block over that behind the first",
    "late turn": "degrees by which a sublayer of the last quarter turns the residual",
    "realised": "share of the (token, sublayer) pairs that were skipped",
}
NOT_MEASURED = "not measured"
SEEN_BEFORE = "partly known before"
# Shown in the main README while undecided: results below the 4-gram table.
SHOWN = ("tokens_and_depth", "start_and_tokens", "five_schemes", "sixty_four_blocks", "nag_start", "rezero_factors")
DECIDED = ("supported", "not supported")
VERDICTS = (*DECIDED, "undecided")
EDGES = 3  # edges named in a reason; if there are more, only their number is given


def table(home: Path = HOME) -> str:
    """Markdown: a row per recipe and size that has a result file in `home`/results."""
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    for name in names():
        recipe = load(name)
        lines += [f"| {' | '.join(cells)} |" for cells in _rows(recipe, home)]
    return "\n".join(lines)


def _rows(recipe: Recipe, home: Path) -> list[list[str]]:
    claim, page = _escape(recipe.header["claim"]), f"[{recipe.name}](pages/{recipe.name}.md)"
    rows = []
    for size, result in standing(results(recipe, home)).items():
        found = result["summary"]
        known = found["evidence"]
        flags = _flags(recipe, size, found)
        seeds = str(known["seeds"]) if known else ""
        rows.append(
            [claim, found["verdict"], _escape(found["headline"]), seeds, budget(known), flags, f"{page}, {size}"]
        )
    return rows or [[claim, NOT_MEASURED, "", "", "", "", page]]


def _flags(recipe: Recipe, size: str, summary: dict[str, Any]) -> str:
    """The flags of the evidence; without evidence, as in fits, those of the summary itself."""
    flags = [*(summary["evidence"].get("flags", ()) or map(short, summary["reasons"]))]
    return ", ".join(flags + [SEEN_BEFORE] * bool(recipe.known(size)))


def results(recipe: Recipe, home: Path = HOME) -> dict[str, dict[str, Any]]:
    """The result files of the recipe's sizes except smoke, by size."""
    files = {size: result_file(home, recipe.name, size) for size in recipe.sizes if size != "smoke"}
    return {size: read_result(path) for size, path in files.items() if path.exists()}


def superseded(found: dict[str, dict[str, Any]]) -> dict[str, str]:
    """Of a recipe's results by size, those whose runs are all contained in another, larger size; with the name of that
    size."""
    runs = {size: {(one.name, json.dumps(one.metrics)) for one in result["records"]} for size, result in found.items()}
    larger = sorted(runs, key=lambda size: len(runs[size]), reverse=True)
    holders = {size: [other for other in larger if runs[size] < runs[other]] for size in runs}
    return {size: others[0] for size, others in holders.items() if others}


def standing(found: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The results that are not superseded."""
    gone = superseded(found)
    return {size: result for size, result in found.items() if size not in gone}


def all_results(home: Path = HOME) -> list[tuple[Recipe, str, dict[str, Any]]]:
    """All results as (recipe, size, result file)."""
    return [(recipe, size, found) for recipe in map(load, names()) for size, found in results(recipe, home).items()]


def findings(home: Path = HOME) -> str:
    """Markdown for the main README: how many claims are decided, which ones, and some of the others."""
    every = [(recipe, *one) for recipe in map(load, names()) for one in standing(results(recipe, home)).items()]
    verdict = lambda result: result["summary"]["verdict"]  # noqa: E731
    tally = ", ".join(f"{sum(verdict(result) == v for *_, result in every)} {v}" for v in VERDICTS)
    decided = [one for one in every if verdict(one[2]) in DECIDED]
    others = {}  # of each recipe, the result with the most tokens
    for one in every:
        if one[0].name in SHOWN and one not in decided:
            others[one[0].name] = max(others.get(one[0].name, one), one, key=lambda known: _tokens(known[2]))
    counted = f"{len(names())} claims have a recipe; of {len(every)} results so far: {tally}."
    lines = [f"{counted} The decided ones, then undecided ones below the 4-gram table:", ""]
    return "\n".join(lines + [_finding(*one) for one in [*decided, *others.values()]])


def _tokens(result: dict[str, Any]) -> float:
    return max(result["summary"]["evidence"]["tokens"])


def _finding(recipe: Recipe, size: str, result: dict[str, Any]) -> str:
    found, known = result["summary"], result["summary"]["evidence"]
    told = "; ".join(part for part in (budget(known), _flags(recipe, size, found)) if part)
    page = f"[{recipe.name}](experiments/pages/{recipe.name}.md)"
    return f"- {recipe.header['claim']} **{found['verdict']}**, {size}: {found['headline']} ({told}; {page})."


def page(name: str, home: Path = HOME) -> str:
    """Markdown: claim, what was measured at each size with figure and table, and the log's entries."""
    recipe = load(name)
    head = recipe.header
    parts = [f"# {name}", f"**Claim.** {head['claim']}", f"**Source.** {head['source']}"]
    parts += [f"**Expected.** {head['expected']}"]
    found = results(recipe, home)
    gone = superseded(found)
    for size, result in found.items():
        parts += _size(recipe, home, size, result, gone.get(size, ""))
    if len(parts) == 4:
        parts.append(f"Not measured. To run it: `{head['command']}` ({head['time']}).")
    entries = log_entries(name, (HOME / "LOG.md").read_text(encoding="utf-8"))
    if entries:
        told = "Verdicts in these entries are of their day; those above are by today's rules."
        parts += ["## From the [log](../LOG.md)", told]
        parts += [f"### {title}\n\n{_one_below(text)}" for title, text in entries]
    generated = "<!-- made by python -m experiments.harness.pages -->"
    return "\n\n".join([generated, *parts]) + "\n"


def _size(recipe: Recipe, home: Path, size: str, result: dict[str, Any], by: str) -> list[str]:
    found, known = result["summary"], result["summary"]["evidence"]
    plot = plot_file(home, recipe.name, size)
    parts = [
        f"## Size {size}: {found['verdict']}" + (f"; superseded by {by}, which holds its runs and more" if by else "")
    ]
    parts += [f"**{found['headline']}**"] if found["headline"] else []
    parts += ["Undecided because of: " + "; ".join(short(reason) for reason in found["reasons"]) + "."] * bool(
        found["reasons"]
    )
    if known:
        told = [
            f"{known['runs']} runs with {known['seeds']} seeds on which no rate was chosen",
            budget(known),
            ", ".join(known["flags"]),
        ]
        if known["ngram"]:
            orders = ", ".join(f"{order}-gram {span(pair, '{:.3f}'.format)}" for order, pair in known["ngram"].items())
            told.append(f"n-gram tables of the same text, means over seeds: {orders} nats per token")
        parts.append("; ".join(part for part in told if part) + ".")
    if before := recipe.known(size):
        parts.append(f"Known when the claim was made: {before}.")
    if plot.exists():
        parts.append(f"![{recipe.name}](../{plot.relative_to(home).as_posix()})")
    parts += [found["measured"][:1].upper() + found["measured"][1:] + "."] if found["measured"] else []
    parts += [markdown(found["table"]), *_legend(found["table"])] if found["table"] else []
    file = result_file(home, recipe.name, size).relative_to(home).as_posix()
    remarks = _since(recipe, size, result) + _replanned(recipe, result)
    remarks += "".join(remark(result) for remark in (_unclean, _again, _machines))
    return [*parts, f"`{result['command']}`: [numbers](../{file}){remarks}"]


def _since(recipe: Recipe, size: str, result: dict[str, Any]) -> str:
    """A note if the size's settings differ today from those in the file, and the command did not set them."""
    made, now = settings_from(recipe, result["settings"]), recipe.sizes[size]
    pairs = {field.name: (getattr(made, field.name), getattr(now, field.name)) for field in dataclasses.fields(now)}
    told = [
        f"{name} {_brief(then)} (today {_brief(today)})"
        for name, (then, today) in pairs.items()
        if then != today and f"--{name.replace('_', '-')}" not in result["command"]
    ]
    return f". Made with other settings than the recipe has today: {', '.join(told)}" if told else ""


def _replanned(recipe: Recipe, result: dict[str, Any]) -> str:
    """Which runs the same settings would make differently today, for example because FLOPs that are to be matched are
    counted differently."""
    found: dict[str, int] = {}
    with contextlib.suppress(UserError):  # some recipes read tables and runs that are not here
        jobs = {job.name: job for job in recipe.plan(settings_from(recipe, result["settings"]))}
        for record in result["records"]:
            told = changed(nested(record.config), jobs[record.name]) if record.name in jobs else ""
            found |= {told: found.get(told, 0) + 1} if told else {}
    listed = ", ".join(f"{told} ({count} of {len(result['records'])} runs)" for told, count in found.items())
    return f". Today's code would plan some of it otherwise: {listed}" if listed else ""


def _again(result: dict[str, Any]) -> str:
    """Which of the file's numbers are not those that the runs left, from `computed_again` in the file or in its runs'
    origin."""
    found = [record.origin["computed_again"] for record in result["records"] if "computed_again" in record.origin]
    told = dict.fromkeys(f"at commit {again['commit'][:7]}: {again['what']}" for again in found)
    return f". Computed again since, {'; '.join(told)}" if told else ""


def _machines(result: dict[str, Any]) -> str:
    """Which arms ran on which processors, if these differ: roundings depend on them."""
    arms: dict[str, set[str]] = {}
    for record in result["records"]:
        if "arm" in record.labels and "factor" not in record.labels and "loss" in record.metrics:
            arms.setdefault(record.labels["arm"], set()).add(record.origin.get("cpu", "an unknown processor"))
    if len({frozenset(own) for own in arms.values()}) < 2:
        return ""
    of = {cpu: [arm for arm, own in sorted(arms.items()) if cpu in own] for cpu in sorted(set().union(*arms.values()))}
    told = "; ".join(f"on {cpu}: {', '.join(own)}" for cpu, own in of.items())
    return f". Runs of different processors, whose roundings differ, are compared ({told})"


def _unclean(result: dict[str, Any]) -> str:
    """The number of runs whose code is not that of a commit."""
    commits = [record.origin.get("commit", "") for record in result["records"]]
    count = sum(commit.endswith("-dirty") for commit in commits)
    return f". {count} of {len(commits)} jobs were done with uncommitted changes in the working copy" if count else ""


def _brief(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(str, value)) if 0 < len(value) <= 4 else str(len(value)) if value else "all"
    return f"{value:g}" if isinstance(value, float) else str(value)


def short(reason: str) -> str:
    """A list of edges, cut to the first few."""
    head, _, listed = reason.partition(": ")
    items = listed.split(", ")
    return f"{head}: {', '.join(items[:EDGES])} and {len(items) - EDGES} more" if len(items) > EDGES else reason


def markdown(rows: list[dict[str, Any]]) -> str:
    show = lambda value: _escape(f"{value:.4g}" if isinstance(value, float) else str(value))  # noqa: E731
    lines = [f"| {' | '.join(rows[0])} |", f"|{'---|' * len(rows[0])}"]
    return "\n".join(lines + [f"| {' | '.join(map(show, row.values()))} |" for row in rows])


def _legend(rows: list[dict[str, Any]]) -> list[str]:
    """Explanations of the columns whose names do not explain themselves."""
    known = [f"*{name}*: {COLUMN[name]}" for name in rows[0] if name in COLUMN]
    return ["; ".join(known) + "."] if known else []


def log_entries(name: str, log: str) -> list[tuple[str, str]]:
    """Title and text of the log entries that name the recipe first, or that mention its result files."""
    found = []
    for entry in re.split(r"^## ", log, flags=re.MULTILINE)[1:]:
        title, _, text = entry.partition("\n")
        named = re.findall(r"`(\w+)[ `.]", entry)
        if (named and named[0] == name) or f"results/{name}." in text:
            found.append((title.strip(), text.strip()))
    return found


def _one_below(text: str) -> str:
    """The text with its relative links changed so that they work one folder further down."""
    return re.sub(r"\]\((?!https?:|#)", "](../", text)


def _escape(text: str) -> str:
    return text.replace("|", "\\|")


def readme(text: str, home: Path = HOME) -> str:
    """experiments/README.md with its table replaced."""
    return _between(text, BEGIN, END, table(home))


def front(text: str, home: Path = HOME) -> str:
    """The main README with its findings replaced."""
    return _between(
        text, "<!-- findings: python -m experiments.harness.pages -->", "<!-- end of findings -->", findings(home)
    )


def _between(text: str, begin: str, end: str, made: str) -> str:
    before, rest = text.split(begin)
    _, after = rest.split(end)
    return f"{before}{begin}\n\n{made}\n\n{end}{after}"


def write_pages() -> None:
    """Rewrites experiments/README.md's table, the main README's findings, and experiments/pages/."""
    for path, renewed in ((HOME / "README.md", readme), (HOME.parent / "README.md", front)):
        write_text(path, renewed(path.read_text(encoding="utf-8")))
    (HOME / "pages").mkdir(exist_ok=True)
    for name in names():
        write_text(HOME / "pages" / f"{name}.md", page(name))


def draw_figures() -> None:
    """Draws the figures of all result files."""
    for recipe, size, result in all_results():
        settings = settings_from(recipe, result["settings"])
        write_plot(HOME, recipe.name, size, recipe.draw, settings, result["records"])


def summarise_again() -> None:
    """Summarises every result file again, from the runs in it."""
    for recipe, size, result in all_results():
        settings = settings_from(recipe, result["settings"])
        write_summary(HOME, recipe.name, size, judged(recipe, settings, result["records"], result["floors"]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser("python -m experiments.harness.pages", description=__doc__)
    parser.add_argument("--figures", action="store_true", help="draw all figures again")
    parser.add_argument("--summaries", action="store_true", help="summarise all result files again")
    given = parser.parse_args()
    if given.summaries:
        summarise_again()
    if given.figures:
        draw_figures()
    write_pages()
