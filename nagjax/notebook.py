"""What one types in a notebook: train in a line, look at what came of it."""

import contextlib
import dataclasses
import difflib
import sys
from collections.abc import Sequence
from pathlib import Path

from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.generate.paths import token_paths
from nagjax.model.config import ModelConfig
from nagjax.report.maps import depth_map as draw_depth_map
from nagjax.report.maps import dial_plot
from nagjax.report.plots import FIGURES, Plot, draw_plots
from nagjax.report.table import Table, comparison_table
from nagjax.residual import Scheme
from nagjax.residual.module import as_scheme
from nagjax.runs.config import OptimizerConfig, RunConfig, TrainConfig
from nagjax.runs.log import Run, load_run
from nagjax.runs.opening import OpenRun, open_run
from nagjax.train.loop import train

DPI, MAP_DPI = 85, 115  # a map has a small letter under every column

AnyRun = OpenRun | Run | str | Path


def fit(
    scheme: str | Scheme = "nag",
    *,
    out: str | Path | None = None,
    fresh: bool = False,
    data: str | DataConfig = "stdlib",
    **options,
) -> OpenRun:
    """Trains a run, or goes on training it, and opens it.

    scheme: a name, a module (`nagjax.NAG`), or a scheme with options (`nagjax.NAG.Scheme(directions=16)`).
    data: a corpus folder, or `"stdlib"`.
    out: the run's folder, runs/SCHEME-dDEPTH-wWIDTH unless given; a finished run in it is opened as it is, `fresh`
    starts over. options: fields of ModelConfig, OptimizerConfig and TrainConfig, under the names they have on the
    command line: depth, width, context, lr, steps, batch, mod...

    Raises UserError for an unknown option, and all that `nagjax.train.loop.train` raises.
    """
    config = run_config(scheme, data, options)
    folder = Path(out or f"runs/{config.scheme.name}-d{config.model.depth}-w{config.model.width}")
    with contextlib.redirect_stderr(sys.stdout):  # a notebook shows stderr as if it were an error
        return open_run(train(config, folder, fresh=fresh))


def run_config(scheme: str | Scheme, data: str | DataConfig, options: dict) -> RunConfig:
    """The config that these options, all in one dict, describe."""
    parts = {"model": ModelConfig, "optimizer": OptimizerConfig, "train": TrainConfig}
    fields = {name: {field.name for field in dataclasses.fields(part)} for name, part in parts.items()}
    known = sorted(set().union(*fields.values()))
    for name in options:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            raise UserError(name, options[name], f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}")
    chosen = {name: part(**{k: v for k, v in options.items() if k in fields[name]}) for name, part in parts.items()}
    data = DataConfig(path=data) if isinstance(data, str) else data
    return RunConfig(scheme=as_scheme(scheme), data=data, **chosen)


def log(run: AnyRun) -> Run:
    """What a run has measured: arrays by step, and by step and sublayer (see `nagjax.runs.log`)."""
    if isinstance(run, Run):
        return run
    return load_run(run.folder if isinstance(run, OpenRun) else run)


def table(runs: AnyRun | Sequence[AnyRun]) -> Table:
    """Runs side by side, a row for every fact. Raises UserError for a run with no evaluation yet."""
    return comparison_table(_logs(runs))


def plot(runs: AnyRun | Sequence[AnyRun], figure: str = "turn") -> Plot:
    """One figure about one or more runs: loss, gap (to the plain run), growth, turn or gate.

    Raises UserError for another name, and where the runs have nothing to draw in it.
    """
    if figure not in FIGURES:
        raise UserError("figure", figure, f"there are {', '.join(FIGURES)}")
    drawn = draw_plots(_logs(runs), (figure,), dpi=DPI)
    if not drawn:
        raise UserError("figure", figure, "these runs have not measured what it shows")
    return drawn[0]


def depth_map(run: OpenRun, text: str, *, top_k: bool = False) -> Plot:
    """Which sublayers each token of the beginning of a text goes through, coloured by the angle they turn it by.

    Routed tokens are chosen by the run's causal decider, or with `top_k` by capacity as in training.
    """
    model = run.config.model
    title = f"{run.config.scheme.title}, {model.depth} blocks x {model.width}"
    return Plot("map", title, draw_depth_map(token_paths(run, text, top_k=top_k), title, dpi=MAP_DPI))


def dial(points: dict) -> Plot:
    """The loss at every point that `nagjax.generate.calibrate.calibrate` has tried, against executed FLOPs."""
    return Plot("dial", "validation loss against executed FLOPs", dial_plot(points, dpi=DPI))


def _logs(runs: AnyRun | Sequence[AnyRun]) -> list[Run]:
    return [log(run) for run in ([runs] if isinstance(runs, AnyRun) else runs)]
