"""Opens a model's folder in another format as a run: a transformers model, or nagjax's own bundle."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import jax
import jax.numpy as jnp
import numpy as np

from nagjax.data import ByteTokenizer, Tokenizer, load_tokenizer
from nagjax.data.tokenizer import JsonTokenizer, NoTokenizer
from nagjax.errors import UserError
from nagjax.files import has_file, inside, what_lacks
from nagjax.files import read_json as read_as_json
from nagjax.interop.families import family_of
from nagjax.interop.families.common import LONGEST
from nagjax.interop.load_tensors import find, flat, load
from nagjax.interop.safetensors import read_folder
from nagjax.interop.tensors import same
from nagjax.interop.tokenizer_files import json_of_bytes
from nagjax.json_reader import build
from nagjax.model.config import ModelConfig
from nagjax.ranges import Natural, Range, check_value
from nagjax.runs.blueprint import ModelBlueprint
from nagjax.runs.config import MeshConfig, RunConfig, TrainConfig, from_dict
from nagjax.runs.names import BUNDLE, TOKENIZER
from nagjax.runs.opening import OpenRun, at_point, devices_of, read_eos
from nagjax.train.distributed.mesh import make_mesh

CUTS = "mod.cuts"
MODEL_CONFIG = "config.json"  # of transformers models; a bundle has one, too


@dataclasses.dataclass(frozen=True)
class _Bundle:
    config: dict
    step: Natural


def read_source(
    folder: str | Path,
    *,
    context: int | None = None,
    dtype: str = "auto",
    devices: Sequence[jax.Device] | None = None,
    calibrated: bool = True,
) -> OpenRun:
    """Opens the model in `folder`, which has a config.json and safetensors. Its step is 0, or a bundle's own.

    context: the most tokens of a sequence; None: that of the config. dtype: that of the computation ("auto", "float32",
    "bfloat16"); parameters are float32 whatever the file holds. devices: parameters are split over them; None: one
    local device. Each shard is read directly for its device. calibrated: opens a calibrated bundle at its rate of
    skipping, as `open_run` does.

    Raises UserError if there is no such model, for a family or setting that nagjax does not support, and for incomplete
    or invalid files (see `nagjax.interop.safetensors` and `nagjax.interop.load_tensors`).
    """
    folder = Path(folder)
    values = read_json(folder)
    devices = devices_of(devices)
    mesh = make_mesh(MeshConfig(data=1, fsdp=len(devices)), devices)
    bundle, config = values.get("model_type") == BUNDLE, source_config(folder, values, context)
    config = dataclasses.replace(config, model=_fitted(config.model, context, dtype))
    blueprint = ModelBlueprint.of(config, mesh)
    files = read_folder(folder)
    if bundle:
        cuts = _cuts(files.pop(CUTS, None), config.model)
        found = find(files, [same(path, path) for path in flat(blueprint.parameters)], blueprint)
    else:
        family, cuts = family_of(values), None
        files = family.prepare(files)
        found = find(files, family.tensors(config.model, values), blueprint, family.prefix, config.model.tied)
    mod = blueprint.init_mod() | {"cuts": jnp.asarray(cuts)} if config.model.mod.active and cuts is not None else {}
    step = values[BUNDLE]["step"] if bundle else 0
    tokenizer, eos = open_tokenizer(folder, values, config.model), read_eos(values, folder, config.model.vocab)
    run = OpenRun(folder, blueprint, step, load(found, blueprint), mod, tokenizer, eos=eos)
    return at_point(run, folder) if calibrated else run


def read_json(folder: Path) -> dict:
    """The values of a folder's config.json. Raises UserError if it is missing or is not a JSON object."""
    path = folder / MODEL_CONFIG
    try:
        values = read_as_json(path)
    except (FileNotFoundError, NotADirectoryError):
        fix = f"{what_lacks(folder, MODEL_CONFIG)}: give the folder of a model"
        raise UserError("source", str(folder), fix) from None
    except (OSError, ValueError) as error:
        raise UserError("source", str(folder), f"its config.json cannot be read ({error})") from None
    if not isinstance(values, dict):
        raise UserError("source", str(folder), "its config.json is not a JSON object")
    return values


def source_config(folder: Path, values: dict, context: int | None = None) -> RunConfig:
    """The config that the config.json `values` of a model's folder describes. Raises UserError as `read_source`
    does."""
    if values.get("model_type") == BUNDLE:
        return _bundled(folder, values)
    if isinstance(values.get("scheme"), dict) and isinstance(values.get("train"), dict):
        raise UserError("source", str(folder), "is a run already: every command opens it")
    return _foreign(values, context)


def _foreign(values: dict, context: int | None) -> RunConfig:
    for name in ("quantization_config", "quantization"):  # "quantization" is MLX's name
        if values.get(name) is not None:
            raise UserError(f"config.json: {name}", values[name], "cannot be imported: quantised weights")
    longest = values.get("max_position_embeddings")
    if context is not None and isinstance(longest, int) and context < longest:
        values = values | {"max_position_embeddings": context, LONGEST: longest}
    try:
        model, scheme = family_of(values).read(values)
    except UserError as error:
        if error.field.startswith("config.json"):
            raise
        raise UserError(f"config.json, read as {error.field}", error.value, error.fix) from None
    except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
        raise UserError("config.json", values.get("model_type"), f"cannot be read ({error!r})") from None
    if model.causal and values.get("is_causal") is False:
        fix = "cannot be imported: a decoder whose tokens see later tokens"
        raise UserError("config.json: is_causal", False, fix)
    return RunConfig(scheme, model, train=TrainConfig(batch=1))  # one row at a time: contexts are long


def _bundled(folder: Path, values: dict) -> RunConfig:
    try:
        own = build(_Bundle, values.get(BUNDLE), BUNDLE, others=(_Bundle,))
        return from_dict(RunConfig, own.config)
    except UserError as error:
        raise UserError(error.field, error.value, f"{error.fix} (in {folder / MODEL_CONFIG})") from None


def _cuts(cuts: np.ndarray | None, model: ModelConfig) -> np.ndarray | None:
    if cuts is not None and (cuts.shape != (model.sublayers,) or cuts.dtype != np.float32 or np.isnan(cuts).any()):
        raise UserError("weights", CUTS, f"must be {model.sublayers} numbers of float32: export the run again")
    return cuts


def _fitted(model: ModelConfig, context: int | None, dtype: str) -> ModelConfig:
    if context is not None and (context < 1 or context > model.context):
        raise UserError("context", context, f"give at least 1 and at most the model's own {model.context}")
    if context not in (None, model.context) and model.positions == "learned":
        raise UserError("context", context, f"learned positions are {model.context}: leave it out")
    return dataclasses.replace(model, context=context or model.context, dtype=model.dtype if dtype == "auto" else dtype)


def open_tokenizer(folder: Path, values: dict, model: ModelConfig) -> Tokenizer:
    """The tokenizer of a model's folder, from its tokenizer.json; `NoTokenizer` if there is none.

    Raises UserError if a text could become an id outside the model's vocabulary.
    """
    path = folder / TOKENIZER
    own = values.get(BUNDLE)
    if isinstance(own, dict) and own.get("tokenizer") == "bytes":
        return ByteTokenizer()
    if not has_file(path):
        ending = values.get("eos_token_id")
        ending = ending[0] if isinstance(ending, list) and ending else ending
        check_value("config.json: eos_token_id", ending, Annotated[int, Range(ge=0, lt=model.vocab)] | None)
        return NoTokenizer(model.vocab, ending or 0)
    tokenizer = load_tokenizer(str(inside(path)))
    if isinstance(tokenizer, JsonTokenizer) and tokenizer.fingerprint == json_of_bytes().fingerprint:
        return ByteTokenizer()  # written by `nagjax export` for other libraries
    least = tokenizer.text_vocab if isinstance(tokenizer, JsonTokenizer) else tokenizer.vocab_size
    if least > model.vocab:  # special ones aside: Gemma 3's for images has no row in text models
        raise UserError("tokenizer", str(path), f"has {least} tokens, the model {model.vocab}")
    return tokenizer
