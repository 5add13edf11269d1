"""Does norm-agnostic depth leave the 1/depth regime? Students of several residuals learn the same deep teachers.

Claim: On teachers of independent blocks, NAG students' loss falls faster with depth than that of ordinary residual
  students.
Source: this project's question to Figliolia & Millidge 2026, arXiv:2606.16112; teachers and students: Liu,
  Kangaslahti, Liu & Gore 2026, arXiv:2602.05970; LayerNorm Scaling: Sun et al. 2025, arXiv:2502.05795
Expected: ordinary students 1 on independent teachers, 3 on tied ones; of the others no figures were published
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: one GPU
Time: smoke 15 s; cpu about 15 min with --processes 2; h200 and paper not measured
Command: python -m experiments.inverse_depth_students --processes 2

If the claim holds, norm-agnostic students, such as NAG's, leave the regime in which the loss falls as 1/depth.

The loss is the mean squared error between final states; there is no head. The students (harness/students.py) differ in
the residual around the same blocks; all kinds have the same teachers and inputs. The learning rate is tuned for every
kind, regime and depth: each student is trained at its kind's own rate times every factor of the grid. The factor of the
lowest test loss on the first teacher is chosen, and only the other teachers count; a best factor at the edge of the
grid is marked. An exponent is the slope of log test loss over log depth, per teacher; its interval is Student's over
those teachers. Sizes below paper train for far fewer steps with higher rates: there the deepest students are the least
converged, which lowers all exponents. The claim is not supported also where the interval of the difference, paired by
teacher, lies within a quarter of 0. It is undecided with fewer than five teachers that count, where an exponent moves
by 0.1 or more as the steps double, a best rate is at the edge of the grid, rates are not tuned, or a student diverged
at every rate on the first teacher, or on another one at the rate chosen.
"""

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from experiments.harness.figures import look, panels, with_spread
from experiments.harness.jobs import Record
from experiments.harness.results import Summary
from experiments.harness.settings import check_ascending
from experiments.harness.statistics import Interval, mean_interval, paired_interval, power_law
from experiments.harness.students import KINDS
from experiments.harness.toy import REGIMES, Toy, ToyTraining
from experiments.harness.verdicts import UNTUNED, few, unsettled
from nagjax.errors import UserError
from nagjax.ranges import Count, Positive

ORDINARY, JUDGED = "ordinary", "nag"
INDEPENDENT = "independent"
STAYS = 0.25


@dataclasses.dataclass(frozen=True)
class Settings:
    depths: tuple[Count, ...]  # blocks of the students
    teachers: Count  # networks to learn, each with students of its own; rates are chosen on the first
    batch: Count
    steps: Count
    faster: Positive  # factor on the paper's learning rates
    factors: tuple[Positive, ...] = (0.5, 1.0, 2.0)  # on top of it
    test_batches: Count = 10
    students: tuple[str, ...] = (ORDINARY, "lns", JUDGED)  # schemes
    regimes: tuple[str, ...] = (
        INDEPENDENT,
        "tied",
    )  # of the teachers' weights: from layer to layer others, or the same


SIZES = {
    "smoke": Settings((2,), 2, 16, 4, 5.0, (1.0,), 1, (JUDGED,), (INDEPENDENT,)),
    "cpu": Settings((4, 8, 16), 4, 128, 2500, 5.0),
    "h200": Settings((6, 12, 16, 24, 32, 48), 6, 1024, 10_000, 2.0),
    "paper": Settings((6, 12, 16, 24, 32, 48), 6, 1024, 80_000, 1.0),
}


def plan(settings: Settings) -> list[ToyTraining]:
    fitting = [name for name, regime in REGIMES.items() if regime.loss == "mse" and regime.student == ORDINARY]
    for field, known in (("regimes", fitting), ("students", list(KINDS))):
        if unknown := set(getattr(settings, field)) - set(known):
            raise UserError(field, sorted(unknown), f"known: {', '.join(known)}")
    check_ascending("factors", settings.factors)
    if settings.teachers < 2:
        raise UserError("teachers", settings.teachers, "give at least 2: rates are chosen on the first")
    if "midpoint" in settings.students and any(depth % 2 for depth in settings.depths):
        raise UserError("depths", settings.depths, "two blocks make a step of midpoint students: give even depths")
    jobs = []
    for kind in settings.students:
        for regime in settings.regimes:
            toy = Toy(
                dataclasses.replace(REGIMES[regime], student=kind),
                settings.depths,
                (1.0,),
                settings.teachers,
                settings.batch,
                settings.steps,
                settings.test_batches,
                faster=settings.faster,
                factors=settings.factors,
            )
            own, labels = f"{regime.replace(', ', '-').replace(' ', '_')}-{kind}", {"regime": regime, "student": kind}
            jobs.append(ToyTraining(own, labels, toy))
            if regime == INDEPENDENT:
                half = dataclasses.replace(toy, steps=max(settings.steps // 2, 1))
                jobs.append(ToyTraining(f"{own}-half", labels | {"half": True}, half))
    return jobs


@dataclasses.dataclass(frozen=True)
class Tuned:
    """Students of one kind and depth at the best learning rate of the grid."""

    factor: float
    edge: bool  # the best is the smallest or largest rate tried
    losses: dict[int, float]  # by teacher, without the one that the rate was chosen on

    @property
    def loss(self) -> Interval:
        return mean_interval(list(self.losses.values()))


def tuned(losses: Float[np.ndarray, "teachers factors"], factors: Sequence[float]) -> Tuned | None:
    """At the factor of lowest loss on the first teacher; None if a student diverged there, or the first teacher's did
    at every factor."""
    sound = np.flatnonzero(np.isfinite(losses[0]))
    best = min(sound, key=lambda at: (losses[0, at], factors[at]), default=None)
    if best is None or not np.isfinite(losses[:, best]).all():
        return None
    edge = len(factors) > 1 and factors[best] in (min(factors), max(factors))
    return Tuned(factors[best], edge, dict(enumerate(losses[1:, best].tolist(), start=1)))


def by_depth(settings: Settings, record: Record) -> dict[int, Tuned]:
    """The students of a job at their best rates; without the depths at which one diverged."""
    losses = record.metrics["losses"].items()
    found = {int(depth): tuned(np.array(own, float), settings.factors) for depth, own in losses}
    return {depth: own for depth, own in found.items() if own is not None}


def exponents(found: dict[int, Tuned]) -> dict[int, float]:
    """By teacher; none for students of less than two depths."""
    if len(found) < 2:
        return {}
    teachers = next(iter(found.values())).losses
    return {teacher: power_law(list(found), [own.losses[teacher] for own in found.values()])[0] for teacher in teachers}


def summarise(settings: Settings, records: Sequence[Record]) -> Summary:
    rows, found, edges, lost, before = [], {}, [], [], {}
    for record in records:
        if record.labels.get("half"):
            before[record.labels["student"]] = exponents(by_depth(settings, record))
            continue
        regime, kind = record.labels["regime"], record.labels["student"]
        best = by_depth(settings, record)
        own = exponents(best)
        found.setdefault(regime, {})[kind] = own
        shown = {f"l={d}": best[d].loss.estimate if d in best else "diverged" for d in settings.depths}
        rates = ", ".join(f"{one.factor:g}{' (edge)' if one.edge else ''}" for one in best.values())
        rows.append({"teachers": regime, "students": kind, "exponent": _text(own)} | shown | {"lr x": rates})
        edges += [f"{regime}-{kind}-{depth}" for depth, one in best.items() if one.edge]
        lost += [f"{kind} of {depth}" for depth in settings.depths if regime == INDEPENDENT and depth not in best]
    told = [
        f"{regime}: {', '.join(f'{kind} {_text(own)}' for kind, own in kinds.items())}"
        for regime, kinds in found.items()
    ]
    own = found.get(INDEPENDENT, {})
    judged = [kind for kind in (ORDINARY, JUDGED) if own.get(kind)]
    counted = settings.teachers - 1
    reasons = few(counted, "teachers")
    reasons += [UNTUNED] if len(settings.factors) == 1 else []
    reasons += [f"diverged: {', '.join(lost)} blocks"] if lost else []
    reasons += [why for kind in judged if (why := unsettled(kind, _mean(own[kind]), _mean(before.get(kind))))]
    judging = [edge for edge in edges if edge.startswith(f"{INDEPENDENT}-")]
    reasons += [f"best rate at the grid's edge: {', '.join(judging)}"] if judging else []
    return Summary(
        f"exponent of the loss in depth, teachers {'; '.join(told)} ({counted} teachers beside that of the rates)",
        "undecided" if reasons else verdict(own.get(ORDINARY, {}), own.get(JUDGED, {})),
        rows,
        {"at_the_grid_edge": edges},
        _headline(own),
        reasons,
    )


def _headline(own: dict[str, dict[int, float]]) -> str:
    if not own.get(ORDINARY) or not own.get(JUDGED):
        return ""
    gap = paired_interval(own[JUDGED], own[ORDINARY])
    return f"NAG's exponent minus that of ordinary students: {gap.text(2)}"


def _mean(own: dict[int, float] | None) -> Interval | None:
    return mean_interval(list(own.values())) if own else None


def _text(own: dict[int, float]) -> str:
    return mean_interval(list(own.values())).text(2) if own else "needs two depths"


def verdict(ordinary: dict[int, float], judged: dict[int, float]) -> str:
    """On exponents by teacher. Not supported: the interval lies below that of ordinary students, or the two hardly
    differ on the same teachers. Supported: above it."""
    if not ordinary or not judged:
        return "undecided"
    a, b = (mean_interval(list(own.values())) for own in (ordinary, judged))
    gap: Interval = paired_interval(judged, ordinary)
    if b.high < a.low or (-STAYS < gap.low and gap.high < STAYS):
        return "not supported"
    return "supported" if b.low > a.high else "undecided"


def draw(settings: Settings, records: Sequence[Record]) -> Figure:
    figure, axes = panels(len(settings.regimes), "Loss of students by depth, each at its best learning rate")
    for ax, regime in zip(axes, settings.regimes, strict=True):
        here = [r for r in records if r.labels["regime"] == regime and not r.labels.get("half")]
        own = {r.labels["student"]: by_depth(settings, r) for r in here}
        for kind, best in own.items():
            if best:
                label = f"{kind}: {_text(exponents(best))}"
                with_spread(
                    ax,
                    list(best),
                    [list(one.losses.values()) for one in best.values()],
                    **look("plain" if kind == ORDINARY else kind),
                    label=label,
                )
        if best := own.get(ORDINARY):
            depths = np.array(list(best), float)
            start = best[min(best)].loss.estimate
            ax.plot(depths, start * depths[0] / depths, color="#999999", linewidth=1, label="1 / depth")
        ax.set_xscale("log", base=2)
        ax.set_yscale("log")
        ax.set_xticks(settings.depths, [str(depth) for depth in settings.depths])
        ax.set_xlabel("blocks of the student")
        ax.set_title(f"teachers: {regime}")
        ax.legend(frameon=False, fontsize=8)
    axes[0].set_ylabel("mean squared error of the final state")
    return figure


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
