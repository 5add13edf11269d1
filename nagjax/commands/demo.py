"""The main job, end to end: train several residual schemes on the same text and show what depth did."""

import dataclasses
import time
from pathlib import Path

from rich.console import Console

from nagjax.data import DataConfig
from nagjax.errors import UserError
from nagjax.files import write_text
from nagjax.generate.sample import complete
from nagjax.model.config import ModelConfig
from nagjax.report.report import write_report
from nagjax.report.table import comparison_table, to_rich
from nagjax.residual import find_scheme
from nagjax.runs.config import OptimizerConfig, RunConfig, TrainConfig
from nagjax.runs.log import load_run
from nagjax.runs.names import SAMPLE
from nagjax.runs.opening import open_run
from nagjax.train.loop import train

PROMPT = "def "


@dataclasses.dataclass(frozen=True)
class Demo:
    """Train residual schemes side by side: same text, seed and number of tokens, each at its own default learning rate.

    Interrupted and started again, it continues. The report is OUT/report.html.
    """

    depth: int = 24  # blocks
    width: int = 64
    steps: int = 200
    batch: int = 8  # sequences per step
    context: int = 128
    schemes: tuple[str, ...] = ("plain", "lns", "review", "nag")
    seed: int = 0
    data: str = "stdlib"  # or a folder made by nagjax data prepare
    out: Path = Path("runs/demo")
    fresh: bool = False  # start over

    def __post_init__(self):
        if self.context < 16:
            raise UserError("context", self.context, "the samples need a context of at least 16")
        if not self.schemes or len(set(self.schemes)) < len(self.schemes):
            raise UserError("schemes", self.schemes, "name at least one scheme, and each once")

    def config(self, scheme: str) -> RunConfig:
        return RunConfig(
            scheme=find_scheme(scheme)(),
            model=ModelConfig(depth=self.depth, width=self.width, context=self.context),
            optimizer=OptimizerConfig(),
            train=TrainConfig(
                steps=self.steps,
                batch=self.batch,
                seed=self.seed,
                eval_every=max(self.steps // 8, 1),
                eval_batches=24,
                save_every=50,
                keep=1,
            ),
            data=DataConfig(path=self.data, seed=self.seed),
        )


def run_demo(demo: Demo, console: Console | None = None) -> Path:
    """Trains every scheme, prints the table, writes the report, and returns the report's path."""
    console = console or Console()
    configs = [demo.config(name) for name in demo.schemes]  # an unknown scheme ends here, before any training
    tokens = demo.steps * demo.batch * demo.context
    console.print(f"{len(configs)} schemes, {demo.depth} blocks x {demo.width}, {tokens:,} tokens each of {demo.data}")
    began = time.monotonic()
    folders = []
    for config in configs:
        folder = demo.out / f"{config.scheme.name}-d{demo.depth}-w{demo.width}"
        label = f"{config.scheme.title:{max(len(c.scheme.title) for c in configs)}}"
        folders.append(train(config, folder, fresh=demo.fresh, label=label))
        sample = complete(open_run(folder), [PROMPT], tokens=min(96, demo.context - 8), temperature=0.8, top_p=0.95)
        write_text(folder / SAMPLE, f"{PROMPT}{sample[0]}\n")
    runs = [load_run(folder) for folder in folders]
    console.print(to_rich(comparison_table(runs), console.width))
    report = write_report(runs, demo.out, f"{demo.depth} blocks deep: what each residual scheme made of it")
    console.print(f"{time.monotonic() - began:.0f} s   report: {report}")
    return report
