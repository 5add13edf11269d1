"""The safetensors format: 8 bytes with the length of the header, a JSON header, and the tensors' bytes. Files are
memory-mapped, so that a tensor's bytes are read only when used. Nothing in a file is ever executed."""

import json
import math
import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

import ml_dtypes
import numpy as np

from nagjax.errors import UserError
from nagjax.files import has_file, inside, naming, read_json, write_text
from nagjax.json_reader import build, parse_json
from nagjax.ranges import Range

DTYPES = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
PACKED = re.compile(r"F[468](_\w+)?|U(16|32|64)")  # dtypes of quantised weights
MOST_AXES = 32  # of a tensor
LONGEST_HEADER = 100 << 20  # bytes, the limit of the format's own reader
INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
Offset = Annotated[int, Range(ge=0, le=2**48)]
SHARD = re.compile(r"-\d{5}-of-\d{5}\.safetensors$")
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")


@dataclass(frozen=True)
class _Index:
    weight_map: dict[str, str]


def read_tensors(path: Path) -> dict[str, np.ndarray]:
    """The tensors of one file by name, as read-only views of its memory map.

    Raises UserError if the file is not complete and valid safetensors.
    """
    try:
        data = np.memmap(inside(path), np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)
    except OSError as error:
        raise UserError("weights", str(path), f"cannot be read ({error.strerror})") from None
    if len(data) < 8:
        raise _broken(path, f"it has {len(data)} bytes")
    length = int.from_bytes(data[:8].tobytes(), "little")
    if not 2 <= length <= min(len(data) - 8, LONGEST_HEADER):
        raise _broken(
            path, f"its header of {length:,} bytes does not fit a file of {len(data):,}: cut short, or a pickle"
        )
    try:
        header = parse_json(data[8 : 8 + length].tobytes())
        if not isinstance(header, dict):
            raise ValueError("it is not a JSON object")
        header.pop("__metadata__", None)
        entries = {name: build(_Entry, entry, name) for name, entry in header.items()}
        body = data[8 + length :]
        _check_cover(entries, len(body))
        return {name: _view(name, body, entry) for name, entry in entries.items()}
    except (ValueError, UserError) as error:
        if isinstance(error, UserError) and error.field == "weights":
            raise
        raise _broken(path, f"its header is damaged ({error})") from None


@dataclass(frozen=True)
class _Entry:
    dtype: str
    shape: tuple[Offset, ...]
    data_offsets: tuple[Offset, ...]


def _check_cover(entries: dict[str, _Entry], size: int) -> None:
    """Raises ValueError unless the tensors fill the file without gaps or overlaps."""
    at = 0
    for name, entry in sorted(entries.items(), key=lambda pair: pair[1].data_offsets):
        if len(entry.data_offsets) != 2 or not entry.data_offsets[0] <= entry.data_offsets[1] <= size:
            raise ValueError(f"{name} lies outside of the file")
        if entry.data_offsets[0] != at:
            raise ValueError(f"{name} begins at byte {entry.data_offsets[0]:,}, the one before it ends at {at:,}")
        at = entry.data_offsets[1]
    if at != size:
        raise ValueError(f"{size - at:,} bytes behind the last tensor belong to none")


def _view(name: str, body: np.ndarray, entry: _Entry) -> np.ndarray:
    begin, end = entry.data_offsets
    if PACKED.fullmatch(entry.dtype):
        raise UserError("weights", name, f"is of {entry.dtype}: quantised weights cannot be imported")
    if entry.dtype not in DTYPES:
        raise ValueError(f"{name} has the dtype {entry.dtype}; known: {', '.join(DTYPES)}")
    dtype = DTYPES[entry.dtype]
    if len(entry.shape) > MOST_AXES:
        raise ValueError(f"{name} has {len(entry.shape)} axes")
    if end - begin != math.prod(entry.shape) * dtype.itemsize:
        raise ValueError(f"{name} of shape {entry.shape} does not take {end - begin} bytes")
    return np.asarray(body[begin:end]).view(dtype).reshape(entry.shape)


def _broken(path: Path, what: str) -> UserError:
    return UserError("weights", str(path), f"is not a safetensors file: {what}; save the model as safetensors again")


def read_folder(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a model's folder: those of model.safetensors, else of the shards that its index names, else of its
    only file.

    Raises UserError if there are no safetensors (naming pickled weights if there are any, which can run code when they
    are read), if a shard is missing, and if an index names tensors that do not exist.
    """
    if index := _index(folder):
        return _sharded(folder, index)
    single = folder / SINGLE
    found = [single] if single.is_file() else sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return read_tensors(found[0])
    if found:
        raise UserError("source", str(folder), f"has {len(found)} safetensors files and no {INDEX}: bring it back")
    if pickles := pickles_in(folder):
        fix = f"has no safetensors but {pickles[0]}: a pickle can run code when it is read; save it as safetensors"
        raise UserError("source", str(folder), f"{fix} (save_pretrained of transformers does)")
    raise UserError("source", str(folder), f"has no {SINGLE}: give the folder of a model")


def pickles_in(folder: Path) -> list[str]:
    """The names of the files in a folder that hold pickled weights."""
    return sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))


def all_there(folder: Path) -> bool:
    """Whether a folder has all the files that `read_folder` reads, which it has not if its download was interrupted.
    Raises UserError for a damaged index."""
    if index := _index(folder):
        return all((folder / name).is_file() for name in _weight_map(index).values())
    return any(path.is_file() and not SHARD.search(path.name) for path in folder.glob("*.safetensors"))


def _index(folder: Path) -> Path | None:
    """The index of the shards, or None if there is a model.safetensors: as in transformers, that file takes precedence,
    because an earlier save may have left the index."""
    index = folder / INDEX
    return index if not (folder / SINGLE).is_file() and has_file(index) else None


def _weight_map(index: Path) -> dict[str, str]:
    """The name of the file that each tensor is in."""
    try:
        weights = build(_Index, read_json(index, largest=LONGEST_HEADER), others=(_Index,)).weight_map
        if not all(Path(name).name == name and "\0" not in name for name in weights.values()):
            raise ValueError("it names files in other folders")
    except (OSError, ValueError, UserError) as error:
        raise UserError("weights", str(index), f"cannot be read ({error}): bring it back") from None
    return weights


def _sharded(folder: Path, index: Path) -> dict[str, np.ndarray]:
    weights = _weight_map(index)
    files = sorted(set(weights.values()))
    if missing := [name for name in files if not (folder / name).is_file()]:
        raise UserError("weights", str(folder / missing[0]), f"is missing: {index.name} names it; bring it back")
    tensors = {}
    for name in files:
        tensors |= {tensor: own for tensor, own in read_tensors(folder / name).items() if weights.get(tensor) == name}
    if lost := sorted(set(weights) - set(tensors)):
        raise UserError("weights", lost[0], f"is in no file, but {index.name} says it is in {weights[lost[0]]}")
    return tensors


class Lazy(NamedTuple):
    """A tensor to be written, whose array `make` creates only when it is written."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    make: Callable[[], np.ndarray]

    @property
    def size(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def write_folder(folder: Path, tensors: Iterable[Lazy], shard_bytes: int = 5 * 10**9) -> None:
    """Writes model.safetensors, or several shards of at most `shard_bytes` bytes each (but at least one tensor) and
    their index."""
    shards: list[list[Lazy]] = [[]]
    for tensor in tensors:
        if shards[-1] and sum(t.size for t in shards[-1]) + tensor.size > shard_bytes:
            shards.append([])
        shards[-1].append(tensor)
    if len(shards) == 1:
        write_tensors(folder / SINGLE, shards[0])
        return
    weights = {}
    for i, shard in enumerate(shards, 1):
        name = f"model-{i:05d}-of-{len(shards):05d}.safetensors"
        write_tensors(folder / name, shard)
        weights |= {tensor.name: name for tensor in shard}
    total = sum(tensor.size for shard in shards for tensor in shard)
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": weights}, indent=2, sort_keys=True)
    write_text(folder / INDEX, text)


def write_tensors(path: Path, tensors: list[Lazy]) -> None:
    """Writes one file, tensor after tensor, with at most one of them in memory."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for tensor in tensors:
        entry = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape)}
        header[tensor.name] = entry | {"data_offsets": [end, end := end + tensor.size]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with naming(path), path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            value = np.asarray(tensor.make(), tensor.dtype, order="C")
            assert value.shape == tensor.shape, (tensor.name, value.shape, tensor.shape)
            file.write(value.tobytes())
        file.flush()
        os.fsync(file.fileno())
