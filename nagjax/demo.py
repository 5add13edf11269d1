"""The runs of `nagjax demo`: residual schemes on the same text, each with a sample of what its model writes."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from nagjax.errors import renamed
from nagjax.memory import keep_freed_memory
from nagjax.options import RunOptions, read_options
from nagjax.processes import as_worker, cores, in_processes

PROMPT = "def "
AS_GIVEN = renamed("data.path", "data")  # errors name the command's option


def demo_runs(schemes: Sequence[str], shared: dict[str, Any]) -> list[RunOptions]:
    """The runs of these schemes, all with the shared options. Raises UserError for an unknown scheme."""
    with renamed("scheme", "schemes"):
        return [read_options(shared | {"scheme": name}) for name in schemes]


@AS_GIVEN
def train_all(schemes: Sequence[str], shared: dict[str, Any], out: Path, fresh: bool, processes: int) -> list[Path]:
    """Trains the runs that are not finished yet, and returns the folders of all runs. processes: number of runs trained
    at the same time, each with its share of the cores; 0: as many as there are runs and cores, but one on an
    accelerator. Raises UserError before training if any run would be refused."""
    keep_freed_memory()  # before jax starts its threads, at the question for its platform
    import jax

    from nagjax.runs.folder import clear, refuse_other_run
    from nagjax.runs.identity import corpus_identity
    from nagjax.runs.lock import WriterLock
    from nagjax.runs.names import CHECKPOINTS
    from nagjax.train.checkpoint.store import steps_saved
    from nagjax.train.loop import checked

    runs = demo_runs(schemes, shared)
    folders = [out / run.folder.name for run in runs]
    for run, folder in zip(runs, folders, strict=True):  # before the processes start, so that an error is printed once
        setup, _ = checked(run.config(), folder, fresh)
        setup.batches.close()
        if steps_saved(folder / CHECKPOINTS) and not fresh:
            refuse_other_run(folder, setup.blueprint.config, corpus_identity(setup.corpus))
    if fresh:
        for folder in folders:
            with WriterLock(folder, "demo"):
                clear(folder)
    count = min(processes or (cores() if jax.default_backend() == "cpu" else 1), len(runs))
    if count > 1:
        in_processes("nagjax.demo", {"schemes": list(schemes), "shared": shared, "out": str(out)}, count)
    else:
        _train(runs, out)
    return folders


def _train(runs: Sequence[RunOptions], out: Path) -> None:
    """Trains the runs that no other process is training."""
    from nagjax.files import has_file, write_text
    from nagjax.generate.sample import complete
    from nagjax.runs.lock import Held, WriterLock
    from nagjax.runs.names import SAMPLE
    from nagjax.runs.opening import open_run
    from nagjax.train.loop import train

    configs = [run.config() for run in runs]
    longest = max(len(config.scheme.title) for config in configs)
    for config, run in zip(configs, runs, strict=True):
        try:
            folder = train(config, out / run.folder.name, label=f"{config.scheme.title:{longest}}")
            if has_file(folder / SAMPLE):
                continue
            length = min(96, config.model.context - 8)
            sample = complete(open_run(folder), [PROMPT], tokens=length, temperature=0.8, top_p=0.95)
            with WriterLock(folder, "demo"):
                write_text(folder / SAMPLE, f"{PROMPT}{sample[0]}\n")
        except Held:
            continue


@AS_GIVEN
def _main(given: Any) -> None:
    keep_freed_memory()
    _train(demo_runs(given["schemes"], given["shared"]), Path(given["out"]))


if __name__ == "__main__":
    as_worker(_main)
