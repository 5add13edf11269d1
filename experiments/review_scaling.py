"""Review Residuals against Highway and standard residuals, matched three ways, over sizes.

Claim: Review Residuals beat additive Highway and standard residuals from about 600M parameters on.
Source: Kramer 2026, arXiv:2606.31859, and its released per-run losses
Expected: Review / Highway / standard 1.4795 / 1.4889 / 1.4901 at 590M (Welch t 3.3 and 3.7, p < 0.05), 1.4876 /
  1.5031 / 1.5040 at 1B (t 2.3 and 2.4, p about 0.07); 60M 1.6891 / 1.6923 / 1.6805, standard ahead below 320M
Hardware: released: any; smoke and cpu: 2 CPU cores; h200: one GPU; paper: 8 GPUs or a TPU slice, one task per run
Time: released 1 s; smoke 20 s; cpu about 30 min with --processes 2; h200 and paper not measured
Command: python -m experiments.review_scaling --size released --csv review_residuals_runs.csv

`--size released` analyses a table of runs (columns size, variant, seed, val_loss). The other sizes train: Review, and
each baseline three times, matched by parameters (widened one unit per head at a time, the paper's rule), by training
FLOPs (more steps) and by time (more steps, by step times measured there). The paper matched parameters only. The
verdict is by Welch's test, as in the paper, at the largest size: supported where Review is ahead of every baseline, not
supported where, by Holm's p, it is behind one. Differences by seed (same data order) stand beside it. Runs trained here
have untuned rates and decide nothing; for them the table also has the expected calibration error (Guo et al. 2017,
arXiv:1706.04599), on their held-out text, mean over seeds.
"""

import csv
import dataclasses
import hashlib
from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure

from experiments.harness.calibration import calibration_error
from experiments.harness.figures import look, panels, with_spread
from experiments.harness.jobs import Job, Record, Training, looked_at, seeded
from experiments.harness.matching import parameters, train_flops, widened, with_flops
from experiments.harness.results import Summary
from experiments.harness.statistics import paired_interval, welch
from experiments.harness.timed import TimeMatched
from experiments.harness.verdicts import LEVEL, barred, holm
from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.model.config import ModelConfig
from nagjax.ranges import Count, Positive
from nagjax.residual import find_scheme
from nagjax.runs.config import OptimizerConfig, RunConfig

COLUMNS = ("size", "variant", "seed", "val_loss")
RELEASED = {"review_neutral": "review", "standard": "plain"}  # the table's names for our schemes
MATCHES = ("parameters", "FLOPs", "time")
CLAIMED = ("review", "highway", "plain")
LARGE = ("590M", "1B")  # the paper's sizes that the claim is about
MARKERS = {"parameters": "o", "FLOPs": "s", "time": "^"}

Shape = tuple[str, int, int, int, int, int]  # name, width, blocks, heads, steps, seeds


@dataclasses.dataclass(frozen=True)
class Settings:
    shapes: tuple[Shape, ...] = ()
    context: Count = 256
    batch: Count = 64
    lr: Positive | None = 2e-4  # None: each scheme's default
    eval_batches: Count = 64
    baselines: tuple[str, ...] = ("highway", "plain")  # schemes that Review is compared with
    matches: tuple[str, ...] = MATCHES  # in what the two are equal
    data: str = "stdlib"  # or a folder made by nagjax data prepare; the paper's is TinyStories with GPT-2's BPE
    csv: str = ""  # analyse this table of runs instead of training


PAPER = (
    ("60M", 512, 8, 8, 8000, 3),
    ("150M", 768, 12, 12, 8000, 3),
    ("320M", 1024, 16, 16, 8000, 2),
    ("590M", 1280, 20, 20, 7000, 3),
    ("1B", 1536, 24, 16, 6000, 3),
)
SIZES = {
    "smoke": Settings((("tiny", 16, 1, 4, 4, 1),), 16, 8, None, 1, ("plain",), ("parameters",)),
    "cpu": Settings((("0.6M", 64, 12, 4, 200, 3),), 128, 8, None, 24),
    "h200": Settings((("60M", 512, 8, 8, 1000, 2),)),
    "paper": Settings(PAPER),
    "released": Settings(csv="review_residuals_runs.csv"),
}


@dataclasses.dataclass(frozen=True)
class Table:
    """A table of finished runs, read."""

    name: str
    labels: dict
    path: str

    def config(self) -> dict:
        return {"table": hashlib.sha256(_content(self.path)).hexdigest()}

    def run(self, folder: Path) -> dict:
        rows = list(csv.DictReader(_content(self.path).decode().splitlines()))
        missing = [name for name in COLUMNS if not rows or name not in rows[0]]
        if missing:
            raise UserError("csv", self.path, f"has no column {', '.join(missing)}")
        named = lambda row: RELEASED.get(row["variant"], row["variant"])  # noqa: E731
        try:
            return {"runs": [[row["size"], named(row), int(row["seed"]), float(row["val_loss"])] for row in rows]}
        except (ValueError, TypeError) as error:  # TypeError: a row that is too short
            raise UserError("csv", self.path, f"holds something that is not a number: {error}") from None


def _content(path: str) -> bytes:
    if not Path(path).is_file():
        raise UserError("csv", path, f"give a table of runs with columns {', '.join(COLUMNS)}")
    return Path(path).read_bytes()


def plan(settings: Settings) -> list[Job]:
    if settings.csv:
        return [Table("released", {}, settings.csv)]
    if unknown := set(settings.matches) - set(MATCHES):
        raise UserError("matches", sorted(unknown), f"known: {', '.join(MATCHES)}")
    return [job for shape in settings.shapes for seed in range(shape[-1]) for job in _jobs(settings, shape, seed)]


def _jobs(settings: Settings, shape: Shape, seed: int) -> list[Job]:
    review = seeded(_config(settings, shape, "review"), seed)
    name = lambda *parts: "-".join((shape[0], *parts, f"s{seed}"))  # noqa: E731
    labels = lambda variant: {"size": shape[0], "variant": variant, "seed": seed}  # noqa: E731
    jobs: list[Job] = [Training(name("review"), labels("review"), review, calibration_error)]
    for scheme in settings.baselines:
        own = seeded(_config(settings, shape, scheme), seed)
        for match in settings.matches:
            called, label = name(scheme, match.lower()), labels(f"{scheme}, equal {match}")
            if match == "parameters":
                jobs.append(Training(called, label, widened(own, parameters, parameters(review)), calibration_error))
            elif match == "FLOPs":
                jobs.append(Training(called, label, with_flops(own, train_flops(review)), calibration_error))
            else:
                jobs.append(TimeMatched(called, label, own, review, calibration_error))
    return jobs


def _config(settings: Settings, shape: Shape, scheme: str) -> RunConfig:
    _, width, depth, heads, steps, _ = shape
    ways = {"context": settings.context, "mlp": "gelu", "positions": "learned", "tied": True, "qk_norm": False}
    model = ModelConfig(depth=depth, width=width, heads=heads, **ways)
    train = looked_at(steps, settings.batch, settings.eval_batches, times=4)
    optimizer = OptimizerConfig(lr=settings.lr, warmup=min(500 / steps, 0.1))
    return RunConfig(find_scheme(scheme)(), model, optimizer, train, DataConfig(path=settings.data))


def losses(records: Sequence[Record]) -> dict[str, dict[str, dict[int, float]]]:
    """By size, variant and seed; runs that diverged are missing."""
    runs = []
    for record in records:
        own = [[*record.labels.values(), record.metrics["loss"]]] if record.labels else record.metrics["runs"]
        runs += [run for run in own if run[-1] is not None]
    found: dict[str, dict[str, dict[int, float]]] = {}
    for size, variant, seed, loss in sorted(runs, key=lambda run: run[2]):
        found.setdefault(size, {}).setdefault(variant, {})[seed] = loss
    known = [shape[0] for shape in PAPER]
    order = sorted(found, key=lambda size: known.index(size) if size in known else -1)
    return {size: dict(sorted(found[size].items(), key=lambda item: item[0] != "review")) for size in order}


def diverged(records: Sequence[Record]) -> set[tuple[str, str]]:
    """Sizes and variants of which a run trained here did."""
    return {(r.labels["size"], r.labels["variant"]) for r in records if r.labels and r.metrics["loss"] is None}


def averaged(records: Sequence[Record], metric: str) -> dict[tuple[str, str], float]:
    """By size and variant, over the seeds; of runs trained here."""
    found: dict[tuple[str, str], list[float]] = {}
    for record in records:
        if metric in record.metrics:
            own = record.metrics[metric]
            found.setdefault((record.labels["size"], record.labels["variant"]), []).append(own)
    return {where: sum(own) / len(own) for where, own in found.items()}


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    found, rows, told = losses(records), [], []
    calibrated, parameters_of = averaged(records, "calibration_error"), averaged(records, "parameters")
    for size, variants in found.items():
        review = variants.get("review", {})
        for variant, own in variants.items():
            mean = sum(own.values()) / len(own)
            row = {"size": size, "variant": variant, "runs": len(own), "mean loss": round(mean, 4)}
            if parameters_of:
                count = parameters_of.get((size, variant))
                row["parameters"] = "" if count is None else round(count)
            if calibrated:
                error = calibrated.get((size, variant))
                row["calibration error"] = "" if error is None else round(error, 4)
            row |= dict.fromkeys(("t", "p", "minus review, by seed"), "")
            if variant != "review" and min(len(own), len(review)) > 1:
                test = welch(list(own.values()), list(review.values()))
                row |= {"t": round(test.t, 2), "p": round(test.p, 4)}
                if own.keys() & review.keys():
                    row["minus review, by seed"] = str(paired_interval(own, review))
            rows.append(row)
        here = [row for row in rows if row["size"] == size]
        means = ", ".join(f"{row['variant']} {row['mean loss']:.4f}" for row in here)
        tests = [f"t {row['t']:.1f} p {row['p']:.2g}" for row in here if row["t"] != ""]
        told.append(f"{size}: {means}" + (f" ({'; '.join(tests)})" if tests else ""))
    largest = list(found)[-1]
    last = [row for row in rows if row["size"] == largest and row["t"] != ""]
    lost = diverged(records)
    sound = lambda row, variant: (row["size"], variant) not in lost  # noqa: E731
    adjusted = zip(last, holm([row["p"] for row in last]), strict=True)
    verdict = "undecided"
    if last and all(row["t"] > 0 and row["p"] < LEVEL and sound(row, "review") for row in last):
        verdict = "supported"
    elif any(row["t"] < 0 and p < LEVEL and sound(row, row["variant"]) for row, p in adjusted):
        verdict = "not supported"
    reasons = []
    if settings.csv:  # what is trained here `evidence.concluded` bars
        reasons = barred(min(map(len, found[largest].values())), [], None, tuned=True)
        reasons += [f"without {variant}" for variant in CLAIMED if variant not in found[largest]]
        reasons += [f"{largest} is not among {', '.join(LARGE)}"] if largest not in LARGE else []
        verdict = "undecided" if reasons else verdict
    least = min(last, key=lambda row: row["t"], default=None)
    head = f"{least['variant']} minus Review at {least['size']}: {least['minus review, by seed']}" if least else ""
    return Summary("; ".join(told), verdict, rows, headline=head, reasons=reasons)


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    found = losses(records)
    figure, (ax,) = panels(1, "Review Residuals minus baselines")
    variants = sorted({variant for own in found.values() for variant in own} - {"review"})
    for place, variant in enumerate(variants):
        sizes = [i for i, own in enumerate(found.values()) if variant in own and "review" in own]
        pairs = [list(found.values())[i] for i in sizes]
        gaps = [
            [own["review"][s] - own[variant][s] for s in own["review"].keys() & own[variant].keys()] for own in pairs
        ]
        if gaps:
            beside = 0.5 * ((place + 0.5) / len(variants) - 0.5)
            scheme, _, match = variant.partition(", equal ")
            style = look(scheme) | ({"marker": MARKERS[match]} if match else {})
            with_spread(ax, [size + beside for size in sizes], gaps, **style, linewidth=1, label=f"minus {variant}")
    ax.axhline(0, color="#999999", linewidth=1)
    ax.set_xticks(range(len(found)), list(found))
    ax.set_xlim(-0.5, len(found) - 0.5)
    ax.set_ylabel("loss (nats per token), by seed; bars: 95%\n(below zero: Review wins)")
    ax.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1.0, 1.0))
    return figure


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
