"""Names of runs and formats of numbers, the same in every table, figure and sentence."""

import math
from collections import Counter
from collections.abc import Sequence

from nagjax.residual.registry import schemes
from nagjax.runs.log import Run

NOT_MEASURED = "n/m"


def run_labels(runs: Sequence[Run]) -> list[str]:
    """A distinct name per run: its scheme's title, followed where needed by its folder's name, and then by its
    number."""
    known = schemes()
    labels = [known[run.scheme].title if run.scheme in known else run.scheme for run in runs]
    for extra in (lambda i: runs[i].path.name, lambda i: f"#{i + 1}"):
        seen = Counter(labels)
        labels = [f"{label} {extra(i)}" if seen[label] > 1 else label for i, label in enumerate(labels)]
    return labels


def machine(run: Run) -> str:
    """The devices that a run was trained on, such as 8 x NVIDIA H200. Every CPU is the device `cpu`, so the name of a
    CPU is added."""
    kind, cpu = run.info.get("device", "unknown device"), run.info.get("cpu")
    named = f" ({cpu})" if kind == "cpu" and cpu else ""
    return f"{run.info.get('devices', '?')} x {kind}{named}"


def count(value: float) -> str:
    """A count with three significant digits and a metric suffix: 1.53M."""
    if not math.isfinite(value):
        return number(value, 0)
    for suffix in ("", "k", "M", "G", "T", "P"):
        if abs(value) < 999.5 or suffix == "P":
            break
        value /= 1000
    return f"{value:.3g}{suffix}"


def number(value: float | None, decimals: int) -> str:
    """The number with fixed decimals; `n/m` if it was not measured (None), `NaN` and `inf` if it is not finite."""
    if value is None:
        return NOT_MEASURED
    if math.isnan(value):
        return "NaN"
    return f"{value:.{decimals}f}"


def factor(value: float) -> str:
    """A ratio with three significant digits: 1.68, 22.0, 1.2k."""
    if not math.isfinite(value) or abs(value) >= 999.5:
        return count(value)
    return f"{value:#.3g}".rstrip(".")


def signed(value: float, decimals: int) -> str:
    """A difference with its sign; the minus is a minus sign, as wide as the plus."""
    return f"{value:+.{decimals}f}".replace("-", "\N{MINUS SIGN}")


def rate(value: float | None) -> str:
    """A learning rate, without trailing zeros: 0.008."""
    return NOT_MEASURED if value is None else f"{value:.4g}"


def listing(parts: Sequence[str]) -> str:
    """An English list: a, b and c."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
