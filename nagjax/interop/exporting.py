"""`nagjax export`: writes a run as a folder that other libraries load: a transformers model, or nagjax's own bundle."""

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import ml_dtypes
import numpy as np

from nagjax.data.tokenizer import NoTokenizer
from nagjax.errors import UserError
from nagjax.files import copy, has_file, write_bytes, write_json
from nagjax.interop.adapter import ADAPTER, adapted_schemes
from nagjax.interop.express import Expressed, express, unadapted
from nagjax.interop.families.common import write_sizes
from nagjax.interop.load_tensors import flat
from nagjax.interop.safetensors import Lazy, write_folder
from nagjax.interop.source import BUNDLE, CUTS, MODEL_CONFIG
from nagjax.interop.tensors import Tensor
from nagjax.interop.tokenizer_files import write_files
from nagjax.mod import ModConfig
from nagjax.ranges import check_value
from nagjax.runs.config import to_dict
from nagjax.runs.names import CALIBRATION
from nagjax.runs.new_folder import check_free, new_folder
from nagjax.runs.opening import OpenRun, open_run, read_origin

Format = Literal["plain", "bundle"]
Dtype = Literal["float32", "bfloat16"]
DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


def export(
    run: str | Path | OpenRun,
    out: str | Path,
    *,
    format: Format = "plain",
    dtype: Dtype = "float32",
    shard_bytes: int = 5 * 10**9,
) -> str:
    """Writes the run to the new folder `out` in safetensors, with config.json and the tokenizer's files, and returns
    the model_type written.

    format: "plain" is the format of the model family in transformers that can express the model; "bundle" holds any
    model whose scheme the AutoModel adapter, included in the bundle, supports. dtype: that of the tensors in the file;
    in every bundle the parameters named by `kept_wide`, and thresholds, are float32. shard_bytes: the most bytes of a
    file.

    Raises UserError for whatever `open_run` does, for an `out` in use, for a setting that no family can express, and
    for a scheme that the adapter does not support. In these cases nothing is written.
    """
    check_value("format", format, Format)
    check_value("dtype", dtype, Dtype)
    run = run if isinstance(run, OpenRun) else open_run(run, calibrated=False)
    run = run.routed(ModConfig()) if run.calibrated else run  # dense; the calibration is a file
    check_free(out)
    scheme, adapted = run.config.scheme.name, adapted_schemes()
    if format == "bundle" and scheme not in adapted:
        fix = f"the AutoModel adapter that a bundle carries has {', '.join(adapted)}; nagjax.load reads the run itself"
        raise UserError("scheme", scheme, fix)
    if format == "bundle" and (missing := unadapted(run.config.model)):
        fix = "the AutoModel adapter that a bundle carries has no place for it; nagjax.load reads the run itself"
        raise UserError(*missing, fix)
    plain = express(run) if format == "plain" else None
    values = plain.values if plain else bundle_config(run)
    tensors = plain_tensors(plain, DTYPES[dtype]) if plain else bundle_tensors(run, DTYPES[dtype])
    with new_folder(out, "export") as building:
        write_folder(building, tensors, shard_bytes)
        write_files(run.tokenizer, run.folder, building)
        if plain is None:
            write_bytes(building / ADAPTER.name, ADAPTER.read_bytes())
            if has_file(run.folder / CALIBRATION):
                copy(run.folder / CALIBRATION, building / CALIBRATION)
        write_json(building / MODEL_CONFIG, values | special_ids(run) | {"dtype": dtype})
    return values["model_type"]


def special_ids(run: OpenRun) -> dict:
    """Ids of the tokens that begin, end and pad a text: those in an imported model's config, else the tokenizer's."""
    origin = read_origin(run.folder)
    given = origin.config if origin else {}
    ending = None if isinstance(run.tokenizer, NoTokenizer) else run.tokenizer.end_of_text
    defaults = {"bos_token_id": None, "eos_token_id": ending, "pad_token_id": None}
    return {name: given.get(name, default) for name, default in defaults.items()}


def plain_tensors(plain: Expressed, dtype: np.dtype) -> Iterator[Lazy]:
    """The tensors under the family's names, block after block."""

    def lazy(tensor: Tensor, name: str, at: tuple[int, ...]) -> Lazy:
        parts = [plain.params[part] for part in tensor.parts]
        shapes = [part.shape[len(at) :] for part in parts]
        shape = tensor.join(*(np.broadcast_to(np.float32(0), shape) for shape in shapes)).shape

        def make() -> np.ndarray:
            own = tensor.join(*(np.asarray(part[at] if at else part) for part in parts))
            return tensor.content(own).astype(dtype)

        return Lazy(name, shape, dtype, make)

    tensors = plain.family.tensors(plain.model, plain.values)
    for tensor in tensors:
        if not tensor.stacked:
            yield lazy(tensor, tensor.name, ())
    for block in range(plain.model.depth):
        for tensor in tensors:
            if tensor.stacked:
                for expert, name in enumerate(tensor.names(block)):
                    yield lazy(tensor, name, (block, expert) if tensor.experts else (block,))


def bundle_config(run: OpenRun) -> dict:
    """nagjax's own settings under one key, and beside it the fields of a config.json that other programs read."""
    model = run.config.model
    own = {
        "config": to_dict(run.config),
        "step": run.step,
        "progress": run.progress,
        "tokenizer": run.tokenizer.name,
        "parameters": {path: list(value.shape) for path, value in flat(run.params).items()},
        "indices": model.indices,  # of the sublayers, counted from 1
        "float32": kept_wide(run),
    }
    return {
        "architectures": ["NagjaxForCausalLM"],
        "auto_map": {
            "AutoConfig": "modeling_nagjax.NagjaxConfig",
            "AutoModelForCausalLM": "modeling_nagjax.NagjaxForCausalLM",
        },
        "model_type": BUNDLE,
        **write_sizes(model),
        "nagjax": own,
    }


def kept_wide(run: OpenRun) -> list[str]:
    """Paths of the gates' scalars and vectors (NAG's log gains, alpha, beta; biases), which stay float32 in a file of
    any dtype: they are few, and an error in a logarithm or an exponent affects all logits. Matrices of gates are not
    included."""
    parameters = flat(run.blueprint.parameters)
    return [path for path, parameter in parameters.items() if parameter.role == "gate" and len(parameter.axes) < 2]


def bundle_tensors(run: OpenRun, dtype: np.dtype) -> Iterator[Lazy]:
    """The parameters by their own dotted paths, stacked over blocks, in `dtype`; those of `kept_wide`, and the
    thresholds of Mixture-of-Depths, in float32."""
    wide = kept_wide(run)
    for path, value in flat(run.params).items():
        own = DTYPES["float32"] if path in wide else dtype
        yield Lazy(path, value.shape, own, functools.partial(_fetch, value, own))
    if "cuts" in run.mod:
        cuts = run.mod["cuts"]
        yield Lazy(CUTS, cuts.shape, DTYPES["float32"], functools.partial(_fetch, cuts, DTYPES["float32"]))


def _fetch(value, dtype: np.dtype) -> np.ndarray:
    return np.asarray(value).astype(dtype)
