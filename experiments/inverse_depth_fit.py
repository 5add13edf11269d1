"""Does the loss of language models fall as 1/depth? The scaling law in width, depth and data, fitted to a table.

Claim: In the loss law fitted to 245 Chinchilla runs, the exponent of depth is 1.
Source: Liu, Kangaslahti, Liu & Gore 2026, arXiv:2602.05970, whose released fit has a_l = 1.20 +- 0.27
Expected: converged fit: risk 0.003027, a_l 1.33, bootstrap 95% [0.96, 1.79]; by points dropped
  (1, 20, 40, 60, 80): 1.20, 1.04, 1.33, 1.66, 1.87
Hardware: one CPU core, any size
Time: smoke 1 s; cpu 2 min
Command: python -m experiments.inverse_depth_fit --csv chinchilla_runs.csv

The law: `L = c_m/m^a_m + c_l/l^a_l + c_D/D^a_D + L_0`, with width m, depth l and data D.

The table needs the columns d_model, n_layers, num_tokens, model_size and loss. The objective is the paper's, the mean
squared error of log L; the points with the highest losses are dropped first, 40 of them (203 are left) in the main fit.
Beside it: fits with other numbers of points dropped, fits with offsets l - 1 to l - 3 (as if the first and last layers
did not count), the risk (the objective's value) with a_l held at other values, and a law in parameters and data alone.
`--csv planted` makes a table from known exponents instead.
"""

import csv
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments.harness.figures import COLORS, panels
from experiments.harness.jobs import Record
from experiments.harness.results import Summary
from experiments.harness.scaling_law import bootstrap_parameters, drop_highest, fit, profile
from experiments.harness.statistics import Interval, percentile_interval
from nagjax.errors import UserError
from nagjax.ranges import Count, Natural

COLUMNS = ("d_model", "n_layers", "num_tokens", "model_size", "loss")
PLANTED = "planted"
RUNS = 245  # of the table that the claim is about
TRUTH = {"exponents": (0.9, 1.2, 0.3), "coefficients": (230.0, 4.0, 530.0), "irreducible": 1.75, "noise": 0.005}
HELD = (0.5, 0.75, 1.0, 1.25, 1.5, 1.75, 2.0)
STEADY = 0.25  # how far the exponent may move with the number of dropped points and still count as measured


@dataclasses.dataclass(frozen=True)
class Settings:
    csv: str = ""  # a table of runs, or "planted"
    dropped: tuple[Natural, ...] = (1, 20, 40, 60, 80)  # points left out in the fits beside it
    main: Natural = 40  # points dropped in the main fit
    offsets: tuple[Count, ...] = (1, 2, 3)  # layers that do not count
    bootstrap: Count = 1000  # draws of the points


SIZES = {
    "smoke": Settings(PLANTED, dropped=(1, 40), offsets=(1,), bootstrap=20),
    "cpu": Settings(),
    "h200": Settings(),
    "paper": Settings(),
}


def planted(seed: int = 0, runs: int = RUNS) -> dict[str, np.ndarray]:
    """A table with the truth in `TRUTH`: shapes and amounts of data spread over the ranges of the Chinchilla runs."""
    noise = np.random.default_rng(seed)
    depth = noise.integers(9, 48, runs)
    width = 64.0 * np.round(depth * np.exp(noise.normal(0, 0.35, runs)))
    tokens = np.exp(noise.uniform(np.log(4e8), np.log(4e11), runs))
    terms = zip(TRUTH["coefficients"], (width, depth, tokens), TRUTH["exponents"], strict=True)
    loss = sum(c / x**a for c, x, a in terms) + TRUTH["irreducible"]
    loss = loss * np.exp(noise.normal(0, TRUTH["noise"], runs))
    size = 12.0 * depth * width**2
    return dict(zip(COLUMNS, (width, depth.astype(float), tokens, size, loss), strict=True))


def read_table(path: str) -> dict[str, np.ndarray]:
    """Columns of a CSV file. Raises UserError where it or a column is missing or a value is not a number."""
    if path == PLANTED:
        return planted()
    if not path or not Path(path).is_file():
        raise UserError("csv", path, f"give a table of runs with columns {', '.join(COLUMNS)}, or --csv {PLANTED}")
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    missing = [name for name in COLUMNS if not rows or name not in rows[0]]
    if missing:
        raise UserError("csv", path, f"has no column {', '.join(missing)}")
    try:
        return {name: np.array([float(row[name]) for row in rows]) for name in COLUMNS}
    except (ValueError, TypeError) as error:  # TypeError: a row that is too short
        raise UserError("csv", path, f"holds something that is not a number: {error}") from None


@dataclasses.dataclass(frozen=True)
class Fit:
    """The law on one selection of points, with bootstrap intervals."""

    name: str
    labels: dict
    csv: str
    samples: int

    def config(self) -> dict:
        table = read_table(self.csv)
        digest = hashlib.sha256(np.stack(list(table.values())).tobytes()).hexdigest()
        return self.labels | {"samples": self.samples, "table": digest}

    def run(self, folder: Path) -> dict:
        table = read_table(self.csv)
        if self.labels["dropped"] > (most := len(table["loss"]) - 8):  # seven parameters are fitted
            raise UserError("dropped", self.labels["dropped"], f"leaves too few points: drop at most {most}")
        if self.labels["offset"] >= (least := table["n_layers"].min()):
            raise UserError("offsets", self.labels["offset"], f"the shallowest model has {least:g} layers")
        stays = drop_highest(table["loss"], self.labels["dropped"])
        table = {name: values[stays] for name, values in table.items()}
        loss, tokens = table["loss"], table["num_tokens"]
        x = np.stack([table["d_model"], table["n_layers"] - self.labels["offset"], tokens], axis=1)
        law = fit(x, loss)
        draws = bootstrap_parameters(x, loss, law, self.samples)
        alternative = fit(np.stack([table["model_size"], tokens], axis=1), loss)
        return {
            "rows": len(stays),
            "points": int(stays.sum()),
            "law": dataclasses.asdict(law),
            "exponents": [dataclasses.asdict(percentile_interval(law.exponents[i], draws[:, 3 + i])) for i in range(3)],
            "correlation": float(np.corrcoef(np.log(x[:, 0]), np.log(x[:, 1]))[0, 1]),
            "profile": [list(HELD), profile(x, loss, 1, HELD)],
            "parameters_and_data": dataclasses.asdict(alternative),
            "best_point": dict(zip(("width", "depth", "data"), law.terms(x[np.argmin(loss)]).tolist(), strict=True)),
        }


def plan(settings: Settings) -> list[Fit]:
    cases = [(dropped, 0) for dropped in settings.dropped] + [(settings.main, offset) for offset in settings.offsets]
    if (settings.main, 0) not in cases:
        raise UserError("main", settings.main, f"is not among the numbers of dropped points, {settings.dropped}")
    return [
        Fit(f"drop{dropped}-offset{offset}", {"dropped": dropped, "offset": offset}, settings.csv, settings.bootstrap)
        for dropped, offset in cases
    ]


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    rows = [_row(record) for record in records]
    main = next(r for r in records if r.labels == {"dropped": settings.main, "offset": 0})
    depth = Interval(**main.metrics["exponents"][1])
    scan = {r.labels["dropped"]: r.metrics["law"]["exponents"][1] for r in records if r.labels["offset"] == 0}
    if not depth.low <= 1.0 <= depth.high:
        verdict = "not supported"
    else:
        verdict = "supported" if all(abs(a - 1.0) <= STEADY for a in scan.values()) else "undecided"
    rows_read = main.metrics.get("rows", RUNS)  # older records do not say
    reasons = [f"a table of {rows_read} runs, not {RUNS}"] if rows_read != RUNS else []
    reasons += ["a made-up table"] if settings.csv == PLANTED else []
    verdict = "undecided" if reasons else verdict
    by_dropped = ", ".join(f"{dropped}: {exponent:.2f}" for dropped, exponent in scan.items())
    points, risk = main.metrics["points"], main.metrics["law"]["risk"]
    without = main.metrics["parameters_and_data"]["risk"]
    measured = (
        f"a_l = {depth.text(2)} on {points} points, risk {risk:.6f}; by points dropped {by_dropped}; "
        f"a law without depth (parameters and data) has risk {without:.6f}"
    )
    return Summary(measured, verdict, rows, headline=f"a_l = {depth.text(2)}", reasons=reasons)


def _row(record: Record) -> dict:
    width, depth, data = (Interval(**values).text(3) for values in record.metrics["exponents"])
    law = record.metrics["law"]
    return record.labels | {
        "points": record.metrics["points"],
        "a_m": width,
        "a_l": depth,
        "a_D": data,
        "L_0": round(law["irreducible"], 4),
        "risk": f"{law['risk']:.6f}",
        "without depth": f"{record.metrics['parameters_and_data']['risk']:.6f}",
    }


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    figure, (scan, held) = panels(2, "The depth exponent of the loss, and how well the runs know it")
    for i, (ax_rows, label) in enumerate(_series(settings, records)):
        at = np.arange(len(ax_rows)) + (0 if i == 0 else len(settings.dropped) + 0.5)
        found = [Interval(**record.metrics["exponents"][1]) for record in ax_rows]
        middle = np.array([f.estimate for f in found])
        spread = np.array([[f.estimate - f.low, f.high - f.estimate] for f in found]).T
        scan.errorbar(at, middle, np.maximum(spread, 0), fmt="o", capsize=3, color=COLORS[i], label=label)
    scan.axhline(1, color="#999999", linewidth=1)
    names = [f"drop {d}" for d in settings.dropped] + [f"l - {o}" for o in settings.offsets]
    ticks = [*range(len(settings.dropped)), *(len(settings.dropped) + 0.5 + i for i in range(len(settings.offsets)))]
    scan.set_xticks(ticks, names, rotation=30)
    scan.set_ylabel("depth exponent, bootstrap 95%")
    scan.legend(frameon=False)
    main = next(r for r in records if r.labels == {"dropped": settings.main, "offset": 0})
    held.plot(*main.metrics["profile"], color=COLORS[0], marker="o", label="width, depth, data")
    without = main.metrics["parameters_and_data"]["risk"]
    held.axhline(without, color=COLORS[1], linestyle="--", label="parameters and data, no depth")
    held.set_xlabel("depth exponent held at")
    held.set_ylabel("risk: 100 x mean squared error of log L")
    held.legend(frameon=False)
    return figure


def _series(settings: Settings, records: Sequence[Record]):
    yield [r for r in records if r.labels["offset"] == 0], "by points dropped"
    yield [r for r in records if r.labels["offset"]], f"by offset, {settings.main} dropped"


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
