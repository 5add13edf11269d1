"""The safetensors format: what is no such file is named, and sound files are read as they are. Needs no PyTorch."""

import json
import pickle
import re
import shutil

import jax
import numpy as np
import pytest

import nagjax
from nagjax.errors import UserError
from nagjax.interop.exporting import export
from nagjax.interop.safetensors import Lazy, all_there, read_folder, read_tensors, write_tensors
from nagjax.interop.source import read_source
from nagjax.residual import find_scheme
from tests.interop.test_export import run_of
from tests.interop.test_sources import DOWN, WIDE, model  # noqa: F401

# ruff: noqa: F811


@pytest.mark.parametrize("dtype", ["F8_E4M3", "U32", "F4"])
def test_a_sound_file_of_quantised_weights_is_not_called_damaged(model, dtype):
    path = model / "model.safetensors"
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    header[DOWN]["dtype"] = dtype
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])
    with pytest.raises(UserError, match=f"weights = '{DOWN}': is of {dtype}: quantised"):
        read_source(model)


def damage(path, how):
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    if how == "cut":
        path.write_bytes(data[:-5])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "pickle":
        path.write_bytes(pickle.dumps({"weights": list(range(100))}))
    else:
        name = next(name for name in header if name != "__metadata__")
        header[name] |= {"beyond": {"data_offsets": [0, 10**12]}, "shape": {"shape": [1]}, "dtype": {"dtype": "F7"}}[
            how
        ]
        text = json.dumps(header).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + length :])


@pytest.mark.parametrize("how", ["cut", "empty", "pickle", "beyond", "shape", "dtype"])
def test_a_file_that_is_no_safetensors_is_refused(model, how):
    damage(model / "model.safetensors", how)
    with pytest.raises(UserError, match="model.safetensors.*is not a safetensors file"):
        read_source(model)


def test_pickled_weights_are_refused_unread(tmp_path, model):
    (model / "model.safetensors").unlink()
    with pytest.raises(UserError, match="has no model.safetensors"):
        read_source(model)
    (model / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="pytorch_model.bin.*can run code"):
        read_source(model)
    (model / "config.json").unlink()
    with pytest.raises(UserError, match="there is no config.json in it"):
        nagjax.load(model)
    with pytest.raises(UserError, match="no such folder"):
        nagjax.load(tmp_path / "nowhere")


def test_a_whole_file_comes_before_the_shards_of_an_earlier_save(tmp_path):
    """As transformers has it, which leaves the index where a model is saved anew in one file."""
    run = run_of(find_scheme("plain")(), tmp_path)
    for folder, bytes_of_one in (("sharded", 20_000), ("whole", 2**30)):
        export(run, tmp_path / folder, shard_bytes=bytes_of_one)
    index = "model.safetensors.index.json"
    shutil.copy(tmp_path / "sharded" / index, tmp_path / "whole" / index)
    assert all_there(tmp_path / "whole")
    whole, sharded = (read_source(tmp_path / folder).params for folder in ("whole", "sharded"))
    jax.tree.map(np.testing.assert_array_equal, whole, sharded)


def test_shards_that_are_missing_or_elsewhere_are_refused(tmp_path):
    run = run_of(find_scheme("plain")(), tmp_path)
    export(run, tmp_path / "model", shard_bytes=20_000)
    folder = tmp_path / "model"
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(names) > 2 and all(path.stat().st_size < 30_000 for path in folder.glob("*.safetensors"))
    (folder / names[1]).rename(tmp_path / names[1])
    with pytest.raises(UserError, match=f"{names[1]}.*is missing"):
        read_source(folder)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(names[1], f"../{names[1]}"))
    with pytest.raises(UserError, match="other folders"):
        read_source(folder)


def test_a_tensor_is_that_of_the_shard_where_the_index_has_it(tmp_path):
    one, two, index = (tmp_path / name for name in ("a.safetensors", "b.safetensors", "model.safetensors.index.json"))
    of = lambda name, value: Lazy(name, (2,), np.dtype(np.float32), lambda: np.full(2, value, np.float32))  # noqa: E731
    write_tensors(one, [of("w", 1.0)])
    write_tensors(two, [of("w", 7.0), of("v", 0.0)])
    index.write_text(json.dumps({"weight_map": {"w": one.name, "v": two.name}}))
    found = read_folder(tmp_path)
    assert sorted(found) == ["v", "w"] and found["w"].tolist() == [1.0, 1.0]
    index.write_text(json.dumps({"weight_map": {"w": one.name, "v": one.name}}))
    with pytest.raises(UserError, match="weights = 'v': is in no file, but .* says it is in a.safetensors"):
        read_folder(tmp_path)


def test_the_readers_view_is_the_file(model):
    first, again = (read_tensors(model / "model.safetensors") for _ in range(2))
    assert set(first) == set(again) and not any(value.flags.writeable for value in first.values())
    assert all(value.dtype == WIDE for value in first.values())


def entry(shape, begin, end, dtype="F32"):
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    ("header", "body", "said"),
    [
        ({"a": entry([2], 0, 8), "b": entry([2], 4, 12)}, 12, "b begins at byte 4, the one before it ends at 8"),
        ({"a": entry([2], 0, 8), "b": entry([2], 0, 8)}, 8, "begins at byte 0, the one before it ends at 8"),
        ({"a": entry([2], 0, 8), "b": entry([2], 12, 20)}, 20, "b begins at byte 12"),
        ({"a": entry([2], 0, 8)}, 9, "1 bytes behind the last tensor belong to none"),
        ({"a": entry([2], 8, 0)}, 8, "lies outside"),
        ({"a": entry([2], 0, 16)}, 8, "lies outside"),
        ({"a": entry([-2], 0, 8)}, 8, "a.shape[0] = -2: give a whole number"),
        ({"a": entry([2**40, 0], 0, 8)}, 8, "does not take 8 bytes"),
        ({"a": entry([2**48] * 5000, 0, 8)}, 8, "a has 5000 axes"),
        ({"a": entry([2.0], 0, 8)}, 8, "a.shape[0] = 2.0"),
        ({"a": entry([2], 0, 8, "F7")}, 8, "has the dtype F7"),
        ({"a": {"dtype": "F32", "shape": [2]}}, 8, "a.data_offsets = None: is missing"),
        ({"a": entry([2], 0, 8) | {"more": 1}}, 8, "has no such fields"),
        ({"a": None}, 0, "must be one JSON object"),
        ([], 0, "it is not a JSON object"),
    ],
)
def test_a_header_that_is_not_whole_is_refused(tmp_path, header, body, said):
    text = json.dumps(header).encode()
    (tmp_path / "a.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(body))
    with pytest.raises(UserError, match=re.escape(said)):
        read_tensors(tmp_path / "a.safetensors")
