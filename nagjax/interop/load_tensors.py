"""Turns a file's tensors into a run's parameters: first checks all of them, then reads shard by shard."""

import itertools
import math
import re
from collections.abc import Mapping

import jax
import numpy as np

from nagjax.errors import UserError
from nagjax.interop.tensors import Tensor
from nagjax.runs.blueprint import ModelBlueprint, Tree
from nagjax.runs.config import nested

# Buffers that some files hold besides the parameters; the config determines them.
BUFFERS = re.compile(r"(rotary_emb\.inv_freq|\.attn\.bias|\.attn\.masked_bias|attention\.bias|attention\.masked_bias)$")
HEADS = ("lm_head", "embed_out", "cls.predictions.decoder", "lm_head.decoder")
LARGEST_JOINED = 1 << 26  # elements up to which a mismatch is reported as the shape of the joined tensor
FLOATS = ("float64", "float32", "float16", "bfloat16")

Found = dict[str, tuple[Tensor, list[np.ndarray]]]  # by parameter: its tensor, and arrays, per block or just one


def find(
    files: Mapping[str, np.ndarray],
    tensors: list[Tensor],
    blueprint: ModelBlueprint,
    prefix: str = "",
    tied: bool = False,
) -> Found:
    """The arrays that hold each parameter. `prefix` may be missing from all names; `tied`: the files may contain the
    head's table a second time.

    Raises UserError naming tensors that are missing, that the model does not have, that have another shape than the
    config implies, or that are not floating-point.
    """
    if prefix and not any(name.startswith(prefix) for name in files):
        tensors = [tensor._replace(name=tensor.name.removeprefix(prefix)) for tensor in tensors]
    shapes = {path: parameter.shape for path, parameter in flat(blueprint.parameters).items()}
    parts = [part for tensor in tensors for part in tensor.parts]
    assert sorted(parts) == sorted(shapes), sorted(set(parts) ^ set(shapes))
    depth, found, missing, used = blueprint.config.model.depth, {}, [], set()
    for tensor in tensors:
        if not tensor.name:
            found[tensor.parts[0]] = (tensor, [])
            continue
        if tensor.stacked and depth * tensor.each > len(files):  # each block and expert has its own tensors
            of = f"{tensor.each:,} experts in each of the " if tensor.experts else ""
            fix = f"too few for the {of}{depth:,} blocks of the config.json"
            raise UserError("weights", f"{len(files)} tensors", fix)
        wanted = [name for i in range(depth) for name in tensor.names(i)] if tensor.stacked else [tensor.name]
        names = [tensor.alias if tensor.alias in files and name not in files else name for name in wanted]
        missing += [name for name in names if name not in files]
        used |= set(names)
        own = [files[name] for name in names if name in files]
        for name, value in zip(names, own, strict=False):
            _check(
                name, value, tensor, [shapes[part][tensor.stacked + bool(tensor.experts) :] for part in tensor.parts]
            )
        found |= {part: (tensor, own) for part in tensor.parts}
    if missing:
        raise UserError("weights", _listed(missing), "missing: the files are not complete, or of another model")
    duplicates = tuple(f"{name}.weight" for name in HEADS) if tied else ()
    extra = [name for name in files if name not in used and name not in duplicates and not BUFFERS.search(name)]
    if extra:
        raise UserError("weights", _listed(extra), "the config.json has no place for these: it is of another model")
    for name in (name for name in duplicates if name in files and name not in used):
        _check_same(name, files[name], found["embedding.tokens"][1][0])
    return found


def _check_same(name: str, value: np.ndarray, table: np.ndarray, rows: int = 4096) -> None:
    """Raises UserError unless a tied head that is in the files equals the embedding."""
    same = value.shape == table.shape
    if not (same and all(np.array_equal(value[i : i + rows], table[i : i + rows]) for i in range(0, len(table), rows))):
        fix = "is not the embedding; config.json says tie_word_embeddings = true: set it to false, or remove the tensor"
        raise UserError("weights", name, fix)


def _check(name: str, value: np.ndarray, tensor: Tensor, shapes: list[tuple[int, ...]]) -> None:
    if value.dtype.name not in FLOATS:
        raise UserError("weights", name, f"is of {value.dtype.name}: quantised weights cannot be imported")
    blank = np.broadcast_to(np.float32(0), value.shape)
    try:
        got = [part.shape for part in tensor.split(blank)]
    except (ValueError, IndexError):
        got = None
    if got != shapes:
        large = sum(map(math.prod, shapes)) > LARGEST_JOINED  # a config.json may claim any size
        want = shapes if large else tensor.join(*(np.broadcast_to(np.float32(0), shape) for shape in shapes)).shape
        raise UserError("weights", name, f"has the shape {value.shape}; the config.json says {want}")


def load(found: Found, blueprint: ModelBlueprint) -> Tree:
    """The parameters in float32. Each shard is read directly for its device, so that the host never holds more than one
    shard."""
    abstract = flat(blueprint.abstract_params())
    placed = {path: _place(path, leaf, *found[path]) for path, leaf in abstract.items()}
    return nested(placed)


def _place(path: str, leaf: jax.ShapeDtypeStruct, tensor: Tensor, own: list[np.ndarray]) -> jax.Array:
    part = tensor.parts.index(path)

    def shard(index: tuple[slice, ...]) -> np.ndarray:
        if not own:
            sizes = [len(range(size)[at]) for size, at in zip(leaf.shape, index, strict=True)]
            return np.full(sizes, tensor.offset, leaf.dtype)
        if not tensor.stacked:
            value = tensor.value(tensor.split(own[0])[part][index])
            return _sound(path, np.array(value, leaf.dtype, order="C"))
        chosen = [range(size)[at] for size, at in zip(leaf.shape, index, strict=True)]
        blocks, experts = chosen[0], chosen[1] if tensor.experts else range(1)
        inner = index[2:] if tensor.experts else index[1:]
        rows = np.empty([len(own) for own in chosen], leaf.dtype)
        flat = rows.reshape(-1, *rows.shape[len(index) - len(inner) :])
        for row, (block, expert) in zip(flat, itertools.product(blocks, experts), strict=True):
            row[...] = tensor.value(tensor.split(own[block * tensor.each + expert])[part][inner])
        return _sound(path, rows)

    return jax.block_until_ready(jax.make_array_from_callback(leaf.shape, leaf.sharding, shard))


def _sound(path: str, value: np.ndarray) -> np.ndarray:
    if not np.isfinite(value).all():
        wrong = value.size - np.isfinite(value).sum()
        fix = f"{wrong:,} of its {value.size:,} weights are NaN or infinite in float32: fetch the model again"
        raise UserError("weights", path, fix)
    return value


def flat(tree: Tree) -> dict:
    """A nested dict's leaves by dotted path."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {".".join(key.key for key in path): leaf for path, leaf in leaves}


def _listed(names: list[str], limit: int = 3) -> str:
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more
