"""One way to open any model nagjax can read."""

from collections.abc import Sequence
from pathlib import Path

import jax

from nagjax.errors import UserError
from nagjax.files import has_file
from nagjax.interop.hub import find_model, shipped
from nagjax.interop.source import MODEL_CONFIG, read_json, read_source
from nagjax.runs.opening import OpenRun, open_run


def load(path: str | Path, *, devices: Sequence[jax.Device] | None = None) -> OpenRun:
    """The model in a folder, with its parameters (`params`), its `model` and its `tokenizer`.

    path: a run (of `nagjax train`, `import` or `prune`), a bundle that `nagjax export` has written, or a transformers
    model in safetensors of a family that nagjax reads; also the name of a model in the folder models/ of a clone
    (`"nag-24"`), and OWNER/NAME of the Hugging Face hub, where its local cache has that. devices: parameters are split
    over them.

    Raises UserError: no such model, and what `open_run` and `read_source` raise.
    """
    folder = find_model(path)
    if not has_file(folder / MODEL_CONFIG):
        fix = ", ".join(["there is no config.json in it: give the folder of a run or a model", *shipped()])
        raise UserError("run", str(path), fix)
    if isinstance(read_json(folder).get("scheme"), dict):
        return open_run(folder, devices=devices)
    return read_source(folder, devices=devices)
