"""Functions for a notebook: train a run in one line, and look at its results."""

import contextlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import jax

from nagjax.console import say
from nagjax.errors import UserError
from nagjax.generate.paths import token_paths
from nagjax.options import read_options
from nagjax.ranges import Positive, check_value
from nagjax.report.maps import depth_map as draw_depth_map
from nagjax.report.maps import skip_curve_plot
from nagjax.report.plots import FIGURES, Plot, draw_plots
from nagjax.report.table import Table, comparison_table
from nagjax.residual import Scheme
from nagjax.residual.module import as_scheme
from nagjax.runs.log import Run, load_run
from nagjax.runs.names import CHECKPOINTS
from nagjax.runs.opening import OpenRun, open_run
from nagjax.train.checkpoint.store import finished
from nagjax.train.loop import train

DPI, MAP_DPI = 85, 115  # a map has a small letter under every column

ARGUMENTS = ("out", "fresh", "resume", "force", "callback")  # arguments of fit that are not options of a run
# What an error of fit says in place of an option of the command line; commands that it quotes keep theirs.
KEYWORDS = {
    r"--fresh\b": "fresh=True",
    r"--force\b": "force=True",
    r"--resume=previous\b": 'resume="previous"',
    r"--out\b(?! RUN)": "out",
}
AnyRun = OpenRun | Run | str | Path


def fit(
    scheme: str | Scheme | None = None,
    *,
    out: str | Path | None = None,
    fresh: bool = False,
    resume: Literal["latest", "previous"] = "latest",
    force: bool = False,
    callback: Callable[[dict[str, Any], OpenRun], None] | None = None,
    **options: Any,
) -> OpenRun:
    """Trains a run, or continues training it, and opens it.

    scheme: a name, a module (`nagjax.NAG`), or a scheme with options (`nagjax.NAG.Scheme(directions=16)`); None: nag.
    With `start` the scheme is that of the starting run, whatever is given here. out: None: runs/SCHEME-dDEPTH-wWIDTH.
    out, fresh, resume, force: as on the command line (with `start` give `out`); a finished run in the folder is opened
    as it is, and a message says so. options: every option of a run, by its name on the command line:
    `depth=12, lr=0.01, preset="60M", start=run.folder`; a group as a dict or as its dataclass, `mesh={"fsdp": 8}`,
    `mod=ModConfig(rate=(0.25,))`, or by the option's own name, `**{"mod.rate": 0.25}`; `data` may also be the path of a
    corpus alone.

    callback: called with each record of the log as it is written, `{"kind": "train", "step": 7, "loss": 2.3, ...}`, and
    with the run in its current state, to evaluate it: `run.logits(text)`, `nagjax.complete(run, prompts)`, `run.model`,
    `run.params`, `run.step`. Nothing is copied for the callback, so the run is valid only until it returns. Records of
    kind `eval` are of the weights at that step; those of kind `train` are read one step late, when `run.step` is
    already one larger. The time of the callback counts into the next step's seconds, and so into its tokens per second
    and MFU. In a run of several processes each process calls it.

    Raises UserError for an unknown option or a value that it does not allow, and for all that `nagjax.train.loop.train`
    refuses.
    """
    check_value("resume", resume, Literal["latest", "previous"])
    told = {} if scheme is None else {"scheme": scheme if isinstance(scheme, str) else as_scheme(scheme)}
    read = read_options({**told, **options}, beside=ARGUMENTS)
    folder = Path(out or read.folder)
    with contextlib.redirect_stderr(sys.stdout), _keywords():  # a notebook shows stderr as if it were an error
        skip, config = resume == "previous", read.config()
        done = not fresh and finished(folder / CHECKPOINTS, config.train.steps)
        train(config, folder, fresh=fresh, skip_damaged=skip, force=force, callback=callback)
        if done and jax.process_index() == 0:
            say(f"opened the finished run in {folder}; fresh=True trains anew, as after a change of a scheme's code")
        return open_run(folder)


@contextlib.contextmanager
def _keywords() -> Iterator[None]:
    """Errors inside name arguments of `fit` in place of options."""
    try:
        yield
    except UserError as error:
        fix = error.fix
        for option, keyword in KEYWORDS.items():
            fix = re.sub(option, keyword, fix)
        raise UserError(error.field, error.value, fix) from error.__cause__


def log(run: AnyRun) -> Run:
    """What a run has measured: arrays by step, and by step and sublayer (see `nagjax.runs.log`). Raises UserError for
    an argument that is not a run."""
    if isinstance(run, Run):
        return run
    if not isinstance(run, AnyRun):
        fix = "give a run's folder, or what nagjax.load, nagjax.fit or nagjax.log returns"
        raise UserError("run", type(run).__name__, fix)
    return load_run(run.folder if isinstance(run, OpenRun) else run)


def table(runs: AnyRun | Sequence[AnyRun]) -> Table:
    """Runs side by side, a row for every fact. Raises UserError for a run without an evaluation."""
    return comparison_table(_logs(runs))


def plot(runs: AnyRun | Sequence[AnyRun], figure: str = "turn") -> Plot:
    """One figure of one or more runs: loss, gap (to the plain run), growth, growth_over_training, turn or gate.

    Raises UserError for another name, and if the runs have measured nothing that the figure shows.
    """
    if not isinstance(figure, str) or figure not in FIGURES:
        raise UserError("figure", figure, f"there are {', '.join(FIGURES)}")
    drawn = draw_plots(_logs(runs), (figure,), dpi=DPI)
    if not drawn:
        raise UserError("figure", figure, "these runs have not measured what it shows")
    return drawn[0]


def depth_map(run: OpenRun, text: str, *, top_k: bool = False, top: float | None = None) -> Plot:
    """Which sublayers each token at the beginning of a text runs, coloured by the angle by which they turn it.

    Routed tokens are chosen by the run's causal decider, or with `top_k` by capacity as in training. top: the angle in
    degrees at which the colours end, for maps that are to be compared; by default 98% of this map's angles are below
    it.
    """
    check_value("top", top, Positive | None, "an angle in degrees")
    check_value("top_k", top_k, bool)
    paths = token_paths(run, text, top_k=top_k)
    model = run.config.model
    title = f"{run.config.scheme.title}, {model.depth} blocks x {model.width}"
    return Plot("map", title, draw_depth_map(paths, title, top=top, dpi=MAP_DPI))


def skip_curve(points: dict) -> Plot:
    """The increase of the loss over executed FLOPs, for every rate that `nagjax.measure.skip_curve.calibrate` has
    tried."""
    if not isinstance(points, dict) or not {"points", "dense"} <= points.keys():
        raise UserError("points", type(points).__name__, "give what nagjax.measure.skip_curve.calibrate returns")
    return Plot("skip_curve", "loss added against executed FLOPs", skip_curve_plot(points, dpi=DPI))


def _logs(runs: AnyRun | Sequence[AnyRun]) -> list[Run]:
    alone = isinstance(runs, AnyRun) or not isinstance(runs, Iterable)
    found = [log(run) for run in ([runs] if alone else runs)]
    if not found:
        raise UserError("runs", [], "give at least one run")
    return found
