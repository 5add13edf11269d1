"""When a run saves a checkpoint, and which of its checkpoints are kept."""

import dataclasses
import math
import time
from collections.abc import Iterable

from nagjax.runs.config import TrainConfig


@dataclasses.dataclass(frozen=True)
class Saved:
    """A complete checkpoint: steps done, and the validation loss at that step if there was an evaluation."""

    step: int
    score: float | None = None


def kept(saved: Iterable[Saved], latest: int, best: int = 0, every: int = 0) -> set[int]:
    """The steps of the checkpoints to keep: the `latest` newest, the `best` with the lowest scores (of equal ones the
    earlier), and those whose step is a multiple of `every` (0: none)."""
    saved = sorted(saved, key=lambda s: s.step)
    regular = {s.step for s in saved if every and s.step % every == 0}
    return {s.step for s in saved[-latest:]} | best_of(saved, best) | regular


def best_of(saved: Iterable[Saved], best: int) -> set[int]:
    """The steps of the `best` checkpoints with the lowest scores; checkpoints whose score is None or NaN do not
    count."""
    scored = sorted((s.score, s.step) for s in saved if s.score is not None and not math.isnan(s.score))
    return {step for _, step in scored[:best]}


class SaveClock:
    """Decides at which steps to save: every `save_every` steps, every `save_minutes` minutes, at a step that ranks
    among the best, and at the end."""

    def __init__(self, config: TrainConfig, now=time.monotonic):
        self.config, self.now = config, now
        self.last = now()

    def overdue(self) -> bool:
        """Whether `save_minutes` have passed by this host's clock."""
        return 0 < 60 * self.config.save_minutes <= self.now() - self.last

    def due(self, step: int, score: float | None, saved: Iterable[Saved], overdue: bool) -> bool:
        """Whether to save at this step. `score` is the validation loss at it, None where there was no evaluation.
        `overdue` is what the hosts agreed on; all else here is equal on every host."""
        config = self.config
        if step == config.steps or step % config.save_every == 0 or overdue:
            return True
        return score is not None and step in best_of([*saved, Saved(step, score)], config.keep_best)

    def restart(self) -> None:
        self.last = self.now()
