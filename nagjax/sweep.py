"""Many runs of one config: over a grid of some options, or over random draws of them.

Each run has a folder of its own and is trained by `nagjax.train.loop.train`: finished runs are not trained again,
interrupted ones are continued, and a run that another process is writing is left to that process. So any number of
processes can work on one sweep: start each with the same command.
"""

import dataclasses
import hashlib
import itertools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from nagjax.config_file import SHORT, overridden, read_values
from nagjax.console import say
from nagjax.errors import UserError
from nagjax.memory import keep_freed_memory
from nagjax.options import RunOptions, read_options
from nagjax.processes import as_worker

Draw = Callable[[np.random.Generator], Any]
LONGEST_NAME = 255  # bytes of a folder's name in a file system
REPEATS = 1000  # draws in a row without a new combination, after which there are taken to be no more
_NUMBER = r"-?[0-9.]+(?:[eE][-+]?[0-9]+)?"


@dataclasses.dataclass(frozen=True)
class Trial:
    """One run of a sweep: its folder's name, the options in which it differs from the others, and all its options."""

    name: str
    varied: dict[str, Any]
    options: RunOptions


@dataclasses.dataclass(frozen=True)
class Varied:
    """An option and its values: a list, or a range from `low` to `high`."""

    option: str
    values: tuple = ()
    low: float = 0.0
    high: float = 0.0

    @classmethod
    def parse(cls, text: str) -> "Varied":
        """Parses `lr=0.001,0.002` or `lr=1e-4..1e-2`. Raises UserError for any other form."""
        option, equals, values = text.partition("=")
        option = option.strip().lstrip("-").replace("-", "_")
        if not equals or not option or not values.strip():
            raise UserError("vary", text, "give an option and its values, as in lr=0.001,0.002 or lr=1e-4..1e-2")
        if ends := re.fullmatch(rf"\s*({_NUMBER})\.\.({_NUMBER})\s*", values):
            low, high = (read_values(end)[0] for end in ends.groups())
            if not all(isinstance(end, int | float) for end in (low, high)) or not 0 < low < high:
                raise UserError("vary", text, "give a range from a number above 0 to a larger one, as in lr=1e-4..1e-2")
            return cls(option, (), low, high)
        try:
            return cls(option, tuple(read_values(values)))
        except UserError as error:
            raise UserError("vary", text, error.fix) from None

    def draw(self, noise: np.random.Generator) -> Any:
        """A random value: from a list, each value with the same probability; from a range, uniform in the logarithm, as
        a whole number if both ends are whole numbers, else rounded to four digits."""
        if self.values:
            return self.values[int(noise.integers(len(self.values)))]
        whole = isinstance(self.low, int) and isinstance(self.high, int)
        drawn = math.exp(noise.uniform(math.log(self.low), math.log(self.high)))
        return round(drawn) if whole else float(f"{drawn:.4g}")


def plan(base: Mapping[str, Any], vary: Sequence[str], draws: int = 0, seed: int = 0) -> list[Trial]:
    """The runs of a sweep: `base`, options by name, with every combination of the values in `vary`; or with `draws`,
    that many random combinations, or all if there are fewer. The first of them are the same for every number of draws.

    Raises UserError for options or values that a run cannot have, a range without `draws`, and an option given twice.
    """
    varied = [Varied.parse(text) for text in vary]
    names = [one.option for one in varied]
    if len({SHORT.get(name, name) for name in names}) < len(names):
        raise UserError("vary", list(vary), "give each option once, with all its values")
    if draws and not varied:
        raise UserError("draws", draws, "there is nothing to draw: give --vary, or leave it out")
    ranges = {one.option: text for text, one in zip(vary, varied, strict=True) if not one.values}
    if draws:
        found, number = {}, 0
        while len(found) < draws and number - max(found, default=0) <= REPEATS:
            noise = np.random.default_rng((seed, number))
            own = {one.option: one.draw(noise) for one in varied}
            if own not in found.values():
                found[number] = own
            number += 1
        return [_trial(f"draw-{number:03d}", own, base, ranges) for number, own in found.items()]
    if ranges:
        raise UserError("vary", [*ranges.values()][0], "a range has no grid: list its values, or give --draws")
    grid = [dict(zip(names, own, strict=True)) for own in itertools.product(*(one.values for one in varied))]
    trials = [_trial(_name(own), own, base, ranges) for own in grid]
    if len({trial.name for trial in trials}) < len(trials):
        raise UserError("vary", list(vary), "two runs would have the same name: give different values")
    return trials


def _trial(name: str, varied: dict[str, Any], base: Mapping[str, Any], ranges: Mapping[str, str]) -> Trial:
    """Makes a run. ranges: by option, the texts of the ranges from which values were drawn, for error messages."""
    given = {SHORT.get(option, option): value for option, value in varied.items()}
    try:
        return Trial(name, varied, read_options(overridden(base, given)))
    except UserError as error:
        if error.field not in ranges:
            raise
        raise UserError("vary", ranges[error.field], f"{error.value} was drawn from it: {error.fix}") from None


def _name(varied: dict[str, Any]) -> str:
    shown = ",".join(f"{option}={value}" for option, value in varied.items()) or "run"
    name = re.sub(r"[^\w.,=+-]+", "_", shown)
    if len(name.encode()) <= LONGEST_NAME:
        return name
    start = name.encode()[: LONGEST_NAME - 9].decode(errors="ignore")
    return f"{start}-{hashlib.sha256(shown.encode()).hexdigest()[:8]}"


def check_all(trials: Sequence[Trial], out: Path) -> None:
    """Raises UserError as `check` does, and for anything for which the training of one of the runs would raise it."""
    from nagjax.train.loop import checked

    check(trials, out)
    for trial in trials:
        if not finished(trial, out):
            checked(trial.options.config(), out / trial.name)[0].batches.close()


def work(trials: Sequence[Trial], out: Path, tell: Callable[[str], None]) -> None:
    """Trains, one after the other, every run that is neither finished nor being trained by another process. If a run
    breaks down, its error is reported and the others go on."""
    import jax

    from nagjax.runs.lock import Held
    from nagjax.train.loop import BROKEN_DOWN, train

    for number, trial in enumerate(trials, 1):
        if finished(trial, out):
            continue
        try:
            train(trial.options.config(), out / trial.name, label=trial.name)
            tell(f"[{number}/{len(trials)}] {trial.name}: finished")
        except Held:
            tell(f"[{number}/{len(trials)}] {trial.name}: another process is at it")
        except UserError as error:
            if error.field not in BROKEN_DOWN:
                raise
            tell(f"[{number}/{len(trials)}] {trial.name}: broke down, and does so again with the same options: {error}")
        jax.clear_caches()


def check(trials: Sequence[Trial], out: Path) -> None:
    """Raises UserError if a run's folder has checkpoints of other options or of another corpus, which are the results
    of another sweep; and if two runs that start from another run would be the same despite different options."""
    from nagjax.data import open_dataset
    from nagjax.runs.folder import refuse_other_run
    from nagjax.runs.identity import corpus_identity
    from nagjax.runs.names import CHECKPOINTS
    from nagjax.train.checkpoint.store import steps_saved
    from nagjax.train.facts import resolved

    corpora, starting = {}, {}
    for trial in trials:
        begun = steps_saved(out / trial.name / CHECKPOINTS)
        config = trial.options.config()
        if not (begun or config.start):
            continue
        if config.data not in corpora:
            corpora[config.data] = open_dataset(config.data)
        corpus = corpora[config.data]
        whole = resolved(config, corpus.tokenizer, out / trial.name)
        if begun:
            refuse_other_run(out / trial.name, whole, corpus_identity(corpus))
        if config.start and (other := starting.setdefault(whole, trial)) is not trial:
            fix = f"are the same run: scheme and model are those of {config.start}; vary something else"
            raise UserError("vary", f"{other.name} and {trial.name}", fix)


def finished(trial: Trial, out: Path) -> bool:
    """Whether a run's last step is saved and evaluated."""
    from nagjax.runs.names import CHECKPOINTS
    from nagjax.train.checkpoint import store

    return store.finished(out / trial.name / CHECKPOINTS, trial.options.train.steps)


def results(trials: Sequence[Trial], out: Path) -> list[dict]:
    """For every run that has begun: `name`, `varied`, `step`, `finished`, and from its last evaluation `loss` (nats per
    token) and `bits_per_byte` (None before the first evaluation, and if not finite). The best runs come first,
    unfinished ones last. They are ranked by bits per byte if the runs have it, because tokens of different tokenizers
    hold different amounts of text. Raises UserError as `check` does."""
    from nagjax.files import has_file
    from nagjax.report.verdict import ranking
    from nagjax.runs.log import load_run
    from nagjax.runs.names import INFO

    check(trials, out)
    begun = [trial for trial in trials if has_file(out / trial.name / INFO)]  # the last file that a new run writes
    runs = {trial.name: load_run(out / trial.name) for trial in begun}
    scored = [name for name, run in runs.items() if run.evals.step.size]
    values = dict(zip(scored, ranking([runs[name] for name in scored])[0], strict=True))
    found = []
    for trial in begun:
        name, run = trial.name, runs[trial.name]
        own = {"name": name, "varied": trial.varied, "step": run.step, "finished": finished(trial, out)}
        last = run.last_eval if name in values else None
        scores = {field: getattr(last, field, math.nan) for field in ("loss", "bits_per_byte")}
        found.append(own | {field: value if math.isfinite(value) else None for field, value in scores.items()})

    def place(own: dict) -> tuple:
        value = values.get(own["name"], math.nan)
        return not own["finished"], not math.isfinite(value), value if math.isfinite(value) else 0.0

    return sorted(found, key=place)


def on_one_text(found: Sequence[dict], out: Path) -> bool:
    """Whether the runs that `results` returned were all scored on the same text, so that their order is meaningful."""
    from nagjax.report.verdict import same_text, scored_parts
    from nagjax.runs.log import load_run

    runs = [load_run(out / own["name"]) for own in found]
    evaluated = [run for run in runs if run.evals.step.size]
    return not evaluated or (same_text(evaluated) and not scored_parts(evaluated))


def of_others(trials: Sequence[Trial], out: Path) -> list[str]:
    """The runs that sweep.json lists and that are not among these trials."""
    from nagjax.files import read_json

    try:
        listed = {own["name"] for own in read_json(out / "sweep.json")}
    except (OSError, ValueError, TypeError, KeyError):
        return []
    return sorted(listed - {trial.name for trial in trials})


def table(found: Sequence[dict]) -> str:
    """The results as a table, one line per run."""
    lines = []
    for own in found:
        scores = (own["loss"], own["bits_per_byte"])
        shown = "".join(f"{'-' if score is None else f'{score:.4f}':>10}" for score in scores)
        told = "" if own["finished"] else f"  (step {own['step']}, not finished)"
        varied = "  ".join(f"{option}={value}" for option, value in own["varied"].items())
        lines.append(f"{shown}  {varied or own['name']}{told}")
    return "\n".join([f"{'loss':>10}{'bits/byte':>10}  run", *lines])


def taken(shard: str) -> slice:
    """The runs of a shard `i/n`: every n-th run from the i-th on, counted from 0. Raises UserError for any other
    text."""
    try:
        index, count = (int(part) for part in shard.split("/"))
    except ValueError:
        index, count = 0, 0
    if not 0 <= index < count:
        raise UserError("shard", shard, "give i/n with i from 0 to n - 1, as in --shard 0/8")
    return slice(index, None, count)


def _main(given: Any) -> None:
    keep_freed_memory()
    work(plan(**given["plan"])[taken(given["shard"])], Path(given["out"]), say)


if __name__ == "__main__":
    as_worker(_main)
