"""Report how much of a model's depth is used, and which blocks could be removed."""

from pathlib import Path
from typing import Annotated

from nagjax.arguments import POSITIONAL
from nagjax.console import say
from nagjax.ranges import Count


def main(
    run: Annotated[Path, POSITIONAL],
    out: Path | None = None,
    data: str | None = None,
    batches: Count = 4,
    skip_batches: Count = 4,
    curve_batches: Count = 8,
    devices: Count = 1,
) -> None:
    """Report how much of a model's depth is used, and which blocks could be removed: diagnosis.html, diagnosis.json.

    Args:
        run: a run folder, or a model that nagjax import reads.
        out: folder for the two files; by default the run's folder (refused while the run is training), or NAME-report
            for a model that is not a run.
        data: another corpus with the same tokenizer to measure on; by default the run's own, or stdlib for an imported
            model.
        batches: batches (of the run's size) for the statistics of the whole model; of a mixture, at least one from each
            corpus.
        skip_batches: batches on which each block is left out in turn; each takes one forward pass per block, over twice
            its sequences.
        curve_batches: batches on which the loss without several blocks is measured.
        devices: split parameters and batches over this many of this machine's devices; the number must divide the run's
            batch, which is 1 for an imported model.
    """
    from nagjax.interop.hub import report_folder

    place = report_folder(run, out)
    say(f"diagnosing {run}, into {place}")
    from nagjax.files import check_writable
    from nagjax.interop.load import load
    from nagjax.report.diagnose_report import write_diagnosis
    from nagjax.report.diagnosis import Effort, diagnose
    from nagjax.runs.lock import lock_of_report
    from nagjax.train.distributed.mesh import local_devices

    opened = load(run, devices=local_devices(devices))
    say(repr(opened))
    check_writable(place)
    with lock_of_report(place, "diagnose"):
        record = diagnose(opened, Effort(batches, skip_batches, curve_batches), data, say=say)
        page = write_diagnosis(record, place)
    print(f"{record['verdict']}\n{page}")
