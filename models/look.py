"""What the models of this folder show of their depth: `PYTHONPATH=. python models/look.py` writes docs/diagnose.

Each model is diagnosed on its held-out text; summary.json keeps an excerpt, and docs/looking_inside.md gets its table.
`--page` alone writes the table again, from summary.json.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path

import nagjax
from benchmarks import plan_tables as tables
from experiments.harness.looks import MODELS
from models.figures import distances, jacobians, lengths
from nagjax.report.curve_plot import curve_plot
from nagjax.report.depth_figures import draw_diagnosis
from nagjax.report.diagnosis import diagnose
from nagjax.report.verdict_depth import USED, confidence_and_accuracy, surely_used_blocks, used_blocks

ROOT = Path(__file__).resolve().parents[1]
FOLDER, PAGE = ROOT / "docs" / "diagnose", ROOT / "docs" / "looking_inside.md"
SUMMARY = FOLDER / "summary.json"
CURVES = ("plain-24", "nag-24", "nag_harmonic-24")  # of which figures are drawn
QUARTER = 6  # blocks of 24
SMALL = 0.05  # of an update's length over the residual's
EXITS = (12, 18)  # blocks after which the head reads


def excerpt(record: dict) -> dict:
    """The figures of a diagnosis that the page tells."""
    skips, sublayers, curve = record["skips"], record["sublayers"], record["curve"]
    sure, right = confidence_and_accuracy(record)
    inside = lambda name, place: sublayers[name][place][0]  # noqa: E731
    first = lambda name, place: sublayers[name][place][1]  # noqa: E731
    added = {rule: {n: loss - curve["loss"] for n, loss, _ in points} for rule, points in curve["rules"].items()}
    found = {
        "verdict": record["verdict"],
        "loss": record["loss"],
        "depth": record["depth"],
        "used": used_blocks(record),
        "surely_used": surely_used_blocks(record),
        "added_loss": skips["added_loss"],
        "standard_error": skips["standard_error"],
        "contributing": skips["contributing"],
        "depth_score": skips["depth_score"],
        "without_a_quarter": {rule: found[QUARTER] for rule, found in added.items()},
        "norm": [inside("norm", 0), inside("norm", -1)],
        "largest_over_median": [inside("massive", -1), first("massive", -1)],
        "attention_on_first": statistics.mean(record["attention"]["first"]),
        "sink_heads": max(record["attention"]["sinks"]),
        "loss_at_exit": {places: record["lens"]["loss"][places] for places in EXITS},
        "overlap_at_exit": {places: record["lens"]["overlap"][places] for places in EXITS},
        "small_updates": sum(value[0] < SMALL for value in sublayers["contribution"]),
        "dead_modulators": sum(record["gates"]["dead"]) if record["gates"] else None,
        "held_gates": record["held_gates"],
        "calibration_error": record["calibration"]["error"],
        "overconfidence": sure - right,
    }
    return json.loads(json.dumps(found), parse_float=lambda text: float(f"{float(text):.4g}"))


def texts(summary: dict[str, dict]) -> dict[str, str]:
    """The table of the page."""
    names = [name for name in MODELS if name in summary]
    every = [summary[name] for name in names]
    rows = [
        ("loss, nats per token", lambda d: f"{d['loss']:.3f}"),
        (f"blocks whose removal alone adds {USED:g} nats or more", lambda d: f"{d['used']} of {d['depth']}"),
        (f"blocks that add more than {USED:g} by over two standard errors", lambda d: f"{d['surely_used']}"),
        ("the two blocks whose removal adds most, counted from 1", _costliest),
        ("effective number of blocks: participation ratio of the added losses", lambda d: f"{d['contributing']:.1f}"),
        (f"loss added without the last {QUARTER} blocks", lambda d: f"{d['without_a_quarter']['late']:+.3f}"),
        (f"without the {QUARTER} before the last", lambda d: f"{d['without_a_quarter']['penultimate']:+.3f}"),
        (f"without the {QUARTER} of least influence", lambda d: f"{d['without_a_quarter']['influence']:+.3f}"),
        (f"without the {QUARTER} neighbours of least angle", lambda d: f"{d['without_a_quarter']['angle']:+.3f}"),
        (
            f"without the {QUARTER} whose removal alone adds least",
            lambda d: f"{d['without_a_quarter']['drop']:+.3f}",
        ),
        ("depth score (12: later blocks use all depths equally)", lambda d: f"{d['depth_score']:.1f}"),
        (
            "length of the residual in front of the first and of the last sublayer",
            lambda d: "{:.1f} to {:.1f}".format(*d["norm"]),
        ),
        (
            "largest feature over the median one at the end, first tokens and others",
            lambda d: "{1:.1f}, {0:.1f}".format(*d["largest_over_median"]),
        ),
        ("attention on the first token of a row, mean over heads", lambda d: f"{d['attention_on_first']:.3f}"),
        ("heads that give it more than 0.3, most in a block", lambda d: f"{d['sink_heads']:.0%}"),
        (
            f"loss if the head reads after block {' and '.join(map(str, EXITS))}",
            lambda d: ", ".join(f"{loss:.1f}" for loss in d["loss_at_exit"].values()),
        ),
        (
            "share of the model's five likeliest tokens that the head has among its five there",
            lambda d: ", ".join(f"{share:.0%}" for share in d["overlap_at_exit"].values()),
        ),
        (
            f"sublayers whose update is shorter than {SMALL:g} of the residual, of 48",
            lambda d: f"{d['small_updates']}",
        ),
        (
            "modulators whose mean tangent is below 0.05, of 48",
            lambda d: "" if d["dead_modulators"] is None else f"{d['dead_modulators']:.0f}",
        ),
        ("loss added with every gate at its mean, whatever the token", _held),
        (
            "expected calibration error; mean confidence minus accuracy",
            lambda d: f"{d['calibration_error']:.3f}; {d['overconfidence']:+.3f}",
        ),
    ]
    return {"models/look.py": tables.table(("", *names), [(name, *map(told, every)) for name, told in rows])}


def _costliest(found: dict) -> str:
    blocks = sorted(range(found["depth"]), key=lambda block: -found["added_loss"][block])[:2]
    return ", ".join(f"{block + 1}: {found['added_loss'][block]:+.2f}" for block in blocks)


def _held(found: dict) -> str:
    return f"{found['held_gates']['mean']['added_loss']:+.2f}" if found["held_gates"] else ""


def write_page(summary: dict[str, dict]) -> None:
    PAGE.write_text(tables.inserted(PAGE.read_text(), texts(summary)))


def look(names: Sequence[str]) -> dict[str, dict]:
    models = {name: nagjax.load(name) for name in names}
    records = {name: diagnose(model, say=lambda text: print(text, flush=True)) for name, model in models.items()}
    FOLDER.mkdir(exist_ok=True)
    for name in CURVES:
        if name in records:
            plots = {plot.name: plot.png for plot in draw_diagnosis(records[name])}
            (FOLDER / f"damage_{name}.png").write_bytes(plots["damage"])
    figures = {
        "lengths": lengths({name: nagjax.log(model) for name, model in models.items()}),
        "distances": distances(records),
        "jacobians": jacobians(records),
    }
    for name, figure in figures.items():
        (FOLDER / f"{name}.png").write_bytes(figure)
    drawn = [(name, records[name]["curve"]) for name in CURVES if name in records]
    if drawn:
        (FOLDER / "curve.png").write_bytes(curve_plot(drawn))
    return {name: excerpt(record) for name, record in records.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("models", nargs="*", default=[name for name in MODELS if (ROOT / "models" / name).exists()])
    parser.add_argument("--page", action="store_true", help="write the table from summary.json, and nothing else")
    args = parser.parse_args()
    if args.page:
        summary = json.loads(SUMMARY.read_text())
    else:
        summary = look(args.models)
        SUMMARY.write_text(json.dumps(summary, indent=1) + "\n")
    write_page(summary)


if __name__ == "__main__":
    main()
