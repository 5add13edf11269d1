"""Opens any model that nagjax can read."""

from collections.abc import Sequence
from pathlib import Path

import jax

from nagjax.errors import UserError
from nagjax.files import has_file, what_lacks
from nagjax.interop.hub import find_model, shipped
from nagjax.interop.source import MODEL_CONFIG, read_json, read_source, source_config
from nagjax.ranges import check_value
from nagjax.runs.config import RunConfig
from nagjax.runs.folder import read_config
from nagjax.runs.opening import OpenRun, open_run


def load(path: str | Path, *, devices: Sequence[jax.Device] | None = None) -> OpenRun:
    """Opens a model, with its parameters (`params`), its `model` and its `tokenizer`.

    path: a run (of `nagjax train`, `import` or `prune`), a bundle that `nagjax export` has written, or a transformers
    model in safetensors of a family that nagjax reads. It may also be the name of a model in the folder models/ of a
    clone (`"nag-24"`), or OWNER/NAME on the Hugging Face hub if its local cache has that model. devices: parameters are
    split over them; None: one local device.

    Raises UserError if there is no such model, and for whatever `open_run` and `read_source` do.
    """
    check_value("run", path, Path, "the folder of a run or a model, or a model's name")
    folder, values = _folder(path)
    if _is_run(values):
        return open_run(folder, devices=devices)
    return read_source(folder, devices=devices)


def config_of(path: str | Path) -> RunConfig:
    """The config of what `load` would open, without reading its parameters. Raises UserError as `load` does."""
    folder, values = _folder(path)
    return read_config(folder) if _is_run(values) else source_config(folder, values)


def _folder(path: str | Path) -> tuple[Path, dict]:
    """A model's folder and its config.json. Raises UserError if there is none."""
    folder = find_model(path)
    if not has_file(folder / MODEL_CONFIG):
        what = what_lacks(folder, MODEL_CONFIG)
        names = shipped() or ["or, where nagjax runs from a clone, the name of one in its folder models/"]
        raise UserError("run", str(path), ", ".join([f"{what}: give the folder of a run or a model", *names]))
    return folder, read_json(folder)


def _is_run(values: dict) -> bool:
    return isinstance(values.get("scheme"), dict)
