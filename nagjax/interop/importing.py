"""`nagjax import`: turns a model made elsewhere into a run's folder, which all commands can open."""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp

from nagjax.data.tokenizer import NoTokenizer
from nagjax.files import copy, has_file, write_json
from nagjax.interop.hub import find_model
from nagjax.interop.source import read_json, read_source
from nagjax.interop.tokenizer_files import copy_into_run
from nagjax.runs.facts import run_facts
from nagjax.runs.identity import found_run
from nagjax.runs.names import CALIBRATION, CHECKPOINTS, INFO, ORIGIN
from nagjax.runs.new_folder import new_folder
from nagjax.runs.opening import OpenRun, at_point
from nagjax.train.checkpoint.store import Checkpoints
from nagjax.train.safety.guard import new_guard
from nagjax.train.state import TrainState


def import_model(
    source: str | Path,
    out: str | Path,
    *,
    context: int | None = None,
    dtype: str = "auto",
    devices: Sequence[jax.Device] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> OpenRun:
    """Reads the model `source`, a folder or a name on the Hugging Face hub (`nagjax.interop.hub`), and writes it as a
    run to the new folder `out`: config.json, a complete checkpoint (parameters only, because the optimizer's state
    would be all zeros), the tokenizer's files, and origin.json. Returns that run, open.

    context, dtype, devices: as for `read_source`. `say` is called with a line about each step. Raises UserError for
    whatever `read_source` does, and for an `out` in use.
    """
    source, out = find_model(source, fetch=True, say=say), Path(out)
    with new_folder(out, "import") as building:
        say("reading the weights")
        run = read_source(source, context=context, dtype=dtype, devices=devices, calibrated=False)
        copy_into_run(run.tokenizer, source, building)
        if has_file(source / CALIBRATION):
            copy(source / CALIBRATION, building / CALIBRATION)
        say("writing the checkpoint")
        write_run(run, building, read_json(source))
    return at_point(dataclasses.replace(run, folder=out), out)


def write_run(run: OpenRun, out: Path, values: dict) -> None:
    """Writes the files of a run except its tokenizer's. `values` is the source's config.json."""
    ids = not isinstance(run.tokenizer, NoTokenizer)
    origin = {
        "source": str(run.folder.absolute()),
        "tokenizer_vocab": run.tokenizer.vocab_size if ids else None,
        "end_of_text": run.tokenizer.end_of_text,
        "config": values,
    }
    for name, content in ((ORIGIN, origin), (INFO, run_facts(run.blueprint))):
        write_json(out / name, content)
    key = jax.random.key_data(jax.random.key(run.config.train.seed))
    state = TrainState(jnp.int32(run.step), run.params, {}, key, run.mod, new_guard())
    with Checkpoints(out / CHECKPOINTS, found_run(out, run.config)) as checkpoints:
        checkpoints.save(run.step, state)
