"""Why loss falls with depth: students of several depths learn a deep teacher, in every regime of the paper.

Claim: A student's loss falls as 1/depth where the teacher's blocks are independent, as 1/depth^3 where they are tied.
Source: Liu, Kangaslahti, Liu & Gore 2026, arXiv:2602.05970, and its released scripts
Expected: exponent 1 for independent teachers at every temperature; 3 for tied ones, more with Runge-Kutta students; for
  tied ones at low temperature 1 after 40k steps, rising with longer training
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: one GPU
Time: smoke 20 s; cpu about 20 min with --processes 2; h200 and paper not measured
Command: python -m experiments.inverse_depth_toy --processes 2

The source's explanation: with independent blocks a student's layers average; with tied ones they discretise a flow.

Regimes and teachers are in harness/toy.py, students in harness/students.py. There is one job per regime, and for the
two regimes that are judged a second one with half of the steps. A job trains all student depths, temperatures and
teachers side by side on the same fresh inputs. Sizes below paper train for far fewer steps with higher rates
(`faster`): there the deepest students are the least converged, which lowers the exponents. An exponent is the slope of
log test loss over log depth, per teacher; its interval is Student's over teachers. The claim is supported where the
interval of independent teachers lies within 0.5 to 1.5 and that of tied ones within 2 to 4, and not supported where one
lies outside. It is undecided with fewer than five teachers, or where an exponent moves by 0.1 or more as the steps
double.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from matplotlib.figure import Figure

from experiments.harness.figures import COLORS, panels
from experiments.harness.jobs import Record
from experiments.harness.results import Summary
from experiments.harness.statistics import Interval, mean_interval, power_law
from experiments.harness.toy import REGIMES, Toy, ToyTraining
from experiments.harness.verdicts import few, unsettled, within
from nagjax.errors import UserError
from nagjax.ranges import Count, Positive

NEAR_ONE, NEAR_THREE = (0.5, 1.5), (2.0, 4.0)
JUDGED = ("independent", "tied")  # regimes without logits, where nothing but the teacher differs


@dataclasses.dataclass(frozen=True)
class Settings:
    depths: tuple[Count, ...]  # blocks of the students, even for Runge-Kutta
    temperatures: tuple[Positive, ...]  # of the regimes with logits
    teachers: Count  # networks to learn, each with students of its own
    batch: Count
    steps: Count
    test_batches: Count = 10
    faster: Positive = 1.0  # factor on the paper's learning rates
    regimes: tuple[str, ...] = tuple(REGIMES)  # which weights, loss and kind of student


SIZES = {
    "smoke": Settings((2, 4), (1.0,), 2, 16, 4, 1, regimes=("tied, Runge-Kutta",)),
    "cpu": Settings((6, 12, 24), (0.03, 0.3, 1.0), 3, 256, 10_000, faster=5.0, regimes=JUDGED),
    "h200": Settings((6, 12, 16, 24, 32, 48), (0.01, 0.1, 1.0), 5, 1024, 10_000, faster=2.0),
    "paper": Settings((6, 12, 16, 24, 32, 48), tuple(np.logspace(-2, 0, 16).tolist()), 5, 1024, 80_000),
}


def plan(settings: Settings) -> list[ToyTraining]:
    if unknown := set(settings.regimes) - set(REGIMES):
        raise UserError("regimes", sorted(unknown), f"known: {', '.join(REGIMES)}")
    if len(settings.depths) < 2 or any(depth % 2 for depth in settings.depths):
        raise UserError("depths", settings.depths, "give at least two even depths")
    jobs = []
    for name in settings.regimes:
        temperatures = settings.temperatures if REGIMES[name].loss == "kl" else (1.0,)
        toy = Toy(
            REGIMES[name],
            settings.depths,
            temperatures,
            settings.teachers,
            settings.batch,
            settings.steps,
            settings.test_batches,
            faster=settings.faster,
        )
        labels = {"regime": name, "temperatures": list(temperatures)}
        own = name.replace(", ", "-").replace(" ", "_")
        jobs.append(ToyTraining(own, labels, toy))
        if name in JUDGED:
            half = dataclasses.replace(toy, steps=max(settings.steps // 2, 1))
            jobs.append(ToyTraining(f"{own}-half", labels | {"half": True}, half))
    return jobs


def exponents(record: Record) -> dict[float, Interval]:
    """By temperature: over the teachers, the exponent of the loss in the student's depth."""
    depths = [int(depth) for depth in record.metrics["losses"]]
    losses = np.array(list(record.metrics["losses"].values()))  # [depths, teachers, temperatures]
    return {
        t: mean_interval([power_law(depths, own)[0] for own in losses[:, :, i].T])
        for i, t in enumerate(record.labels["temperatures"])
    }


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    rows, found, before = [], {}, {}
    for record in records:
        if record.labels.get("half"):
            (before[record.labels["regime"]],) = exponents(record).values()
            continue
        regime = record.labels["regime"]
        logits = REGIMES[regime].loss == "kl"
        for i, (t, exponent) in enumerate(exponents(record).items()):
            found[f"{regime} T={t:.3g}" if logits else regime] = exponent
            means = {f"l={d}": float(np.mean(own, axis=0)[i]) for d, own in record.metrics["losses"].items()}
            rows.append({"regime": regime, "T": t if logits else "", "exponent": exponent.text(2)} | means)
    told = [f"{name} {e.text(2)}" for name, e in found.items()]
    told += [f"{name} at half the steps {e.text(2)}" for name, e in before.items()]
    reasons = few(settings.teachers, "teachers")
    reasons += [why for name in JUDGED if name in found and (why := unsettled(name, found[name], before.get(name)))]
    head = f"exponent on tied teachers: {found['tied'].text(2)}" if "tied" in found else ""
    verdict = "undecided" if reasons else _verdict(found)
    return Summary("; ".join(told), verdict, rows, headline=head, reasons=reasons)


def _verdict(found: dict[str, Interval]) -> str:
    """Of the judged regimes' exponents."""
    independent, tied = found.get("independent"), found.get("tied")
    if independent is None or tied is None:
        return "undecided"
    return within([(independent, NEAR_ONE), (tied, NEAR_THREE)])


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    titles = {"mse": "final states, mean squared error", "kl": "logits, KL"}
    by_loss = {loss: [r for r in records if REGIMES[r.labels["regime"]].loss == loss] for loss in titles}
    shown = {loss: own for loss, own in by_loss.items() if own}
    figure, axes = panels(len(shown), "Loss of students by depth, relative to the shallowest")
    for ax, (loss, own) in zip(axes, shown.items(), strict=True):
        colors = dict(zip(dict.fromkeys(record.labels["regime"] for record in own), COLORS, strict=False))
        for record in own:
            regime, half = record.labels["regime"], record.labels.get("half")
            depths = np.array([int(depth) for depth in record.metrics["losses"]])
            losses = np.array(list(record.metrics["losses"].values()))
            for i, t in enumerate(record.labels["temperatures"]):
                mean = np.exp(np.mean(np.log(losses[:, :, i] / losses[0, :, i]), axis=1))
                style = "--" if half else ("-", "-.", ":")[i % 3]
                name = regime + (f", T = {t:.3g}" if loss == "kl" else "") + (", half of the steps" if half else "")
                ax.loglog(depths, mean, style, marker="o", color=colors[regime], label=name)
        depths = np.array(settings.depths, float)
        for power, shade in ((1, "#999999"), (3, "#cccccc")):
            ax.loglog(depths, (depths / depths[0]) ** -power, color=shade, linewidth=1, label=f"1 / depth^{power}")
        ax.set_xticks(depths, [f"{d:g}" for d in depths])
        ax.minorticks_off()
        ax.set_xlabel("blocks of the student")
        ax.set_title(titles[loss])
        ax.legend(frameon=False, fontsize=7)
    return figure


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
