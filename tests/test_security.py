"""Files from others are only data: no checkpoint, shard, manifest or config can run code or lead out of its folder."""

import ast
import io
import json
import pathlib
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import yaml

import nagjax
import pallas_kernels
from nagjax import config_file
from nagjax.data import DataConfig, open_dataset, prepare, store
from nagjax.data.store import MANIFEST, verify
from nagjax.data.stream import TokenStream
from nagjax.errors import UserError
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig, to_dict
from nagjax.runs.names import MANIFEST as CHECKPOINT_MANIFEST
from nagjax.runs.opening import read_config
from nagjax.train.checkpoint.manifest import write_manifest
from nagjax.train.checkpoint.store import Checkpoints
from nagjax.train.safety.guard import new_guard
from nagjax.train.state import TrainState

FORBIDDEN_IMPORTS = {
    "pickle",
    "dill",
    "cloudpickle",
    "joblib",
    "marshal",
    "shelve",
    "tarfile",
    "zipfile",
    "yaml",
    "runpy",
}
FORBIDDEN_CALLS = {"eval", "exec", "compile", "__import__", "unpack_archive", "system", "popen", "extractall"}
ALLOWED = {"config_file.py": {"yaml"}}  # whose loader makes plain values alone: see below
OWN_METHODS = {"compile"}  # of XLA's lowered programs and of regular expressions


def sources():
    for package in (nagjax, pallas_kernels):
        yield from sorted(pathlib.Path(package.__file__).parent.rglob("*.py"))


def test_a_run_as_a_file_is_loaded_as_plain_values():
    assert issubclass(config_file._Loader, yaml.SafeLoader)
    tree = ast.parse(pathlib.Path(config_file.__file__).read_text(encoding="utf-8"))
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loads = [call for call in calls if isinstance(call.func, ast.Attribute) and call.func.attr.startswith("load")]
    loads = [call for call in loads if isinstance(call.func.value, ast.Name) and call.func.value.id == "yaml"]
    assert [[word.value.id for word in call.keywords] for call in loads] == [["_Loader"]]


def test_nothing_in_the_sources_can_turn_data_into_code():
    seen = 0
    for path in sources():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            where = f"{path}:{getattr(node, 'lineno', 0)}"
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name.partition(".")[0] for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module.partition(".")[0]]
            assert not FORBIDDEN_IMPORTS - ALLOWED.get(path.name, set()) & set(names), where
            if isinstance(node, ast.Call):
                method = isinstance(node.func, ast.Attribute)
                name = node.func.attr if method else getattr(node.func, "id", "")
                assert name not in FORBIDDEN_CALLS or (method and name in OWN_METHODS), f"{where}: {name}"
                keywords = {keyword.arg: keyword.value for keyword in node.keywords}
                for unsafe in ("allow_pickle", "shell", "trust_remote_code"):
                    value = keywords.get(unsafe)
                    assert value is None or (isinstance(value, ast.Constant) and not value.value), f"{where}: {unsafe}"
                seen += 1
    assert seen > 1000


class Bomb:
    """Unpickling it creates a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return pathlib.Path.touch, (self.path,)


def bomb(path) -> bytes:
    file = io.BytesIO()
    np.save(file, np.array([Bomb(path)], object), allow_pickle=True)
    return file.getvalue()


def test_the_bomb_works(tmp_path):
    canary = tmp_path / "canary"
    np.load(io.BytesIO(bomb(canary)), allow_pickle=True)
    assert canary.exists()
    assert pickle.loads(pickle.dumps(1)) == 1


@pytest.fixture
def corpus(tmp_path):
    (tmp_path / "a.txt").write_text("all work and no play. " * 100)
    out = tmp_path / "corpus"
    prepare([str(tmp_path / "a.txt")], out, validation=0.0)
    return out


def manifest(corpus, change) -> None:
    data = json.loads((corpus / MANIFEST).read_text())
    change(data)
    (corpus / MANIFEST).write_text(json.dumps(data))


def shard(data):
    return data["splits"]["train"]["shards"][0]


@pytest.mark.parametrize("ends", [[0], [10**6], [-5], [2**62]], ids=["none", "beyond", "negative", "far"])
def test_documents_end_where_their_tokens_do(corpus, monkeypatch, ends):
    monkeypatch.setattr(store, "SMALL", 0)  # where hashing it all would take long
    path = corpus / "train-00000.documents"
    rows = np.frombuffer(path.read_bytes(), "<i8").reshape(-1, 2).copy()
    rows[-1, 0] = ends[0]
    path.write_bytes(rows.tobytes())
    dataset = open_dataset(DataConfig(str(corpus)))
    with pytest.raises(UserError, match="train-00000.documents.*is damaged"):
        _ = dataset.byte_count  # a run notes it before it begins


@pytest.mark.parametrize(
    "rows", [[[1, 2], [2**62, 2], [-(2**62) - 2, 2], [3, 2]], [[1, 2], [3, -2]], [[1, 2], [3, 2**62]]]
)
def test_numbers_of_an_index_that_add_up_to_more_than_they_can_hold(rows):
    """Differences of these ends are all above 0, as 64 bits have them."""
    stream = TokenStream([(np.zeros(3, np.uint16), np.array(rows, np.int64))], exact=True)
    with pytest.raises(UserError, match="documents.*is damaged"):
        _ = stream.document_ends


def test_a_pickle_in_a_shard_is_only_numbers(corpus, tmp_path, monkeypatch):
    canary, path = tmp_path / "canary", corpus / "train-00000.tokens"
    size = path.stat().st_size
    path.write_bytes(bomb(canary).ljust(size, b"\0")[:size])
    for read in (lambda: open_dataset(DataConfig(str(corpus))), lambda: verify(corpus)):
        with pytest.raises(UserError, match="content changed"):
            read()
    monkeypatch.setattr(store, "SMALL", 0)  # where hashing it all would take long
    dataset = open_dataset(DataConfig(str(corpus)))
    assert dataset.stream.read(0, 4).tolist() == np.frombuffer(b"\x93NUMPY\x01\x00", "<u2").tolist()
    assert not canary.exists()


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/../../secret", "..", "", 7])
def test_a_manifest_names_files_of_its_folder_only(corpus, name):
    (corpus.parent / "secret").write_bytes((corpus / "train-00000.tokens").read_bytes())
    manifest(corpus, lambda data: shard(data)["tokens"].update(name=name))
    with pytest.raises(UserError, match="path = "):
        open_dataset(DataConfig(str(corpus)))


def test_a_shard_is_no_link_to_elsewhere(corpus):
    path = corpus / "train-00000.tokens"
    path.rename(corpus.parent / "elsewhere")
    path.symlink_to(corpus.parent / "elsewhere")
    with pytest.raises(UserError, match="is a link out of"):
        open_dataset(DataConfig(str(corpus)))


@pytest.mark.parametrize("dtype", ["O", "<f8", "nagjax.errors", None, ["<u2"]])
def test_tokens_are_of_a_token_type(corpus, dtype):
    manifest(corpus, lambda data: data.update(dtype=dtype))
    with pytest.raises(UserError, match="is damaged"):
        open_dataset(DataConfig(str(corpus)))


@pytest.mark.parametrize(
    "change",
    [
        lambda data: shard(data).update(token_count=10**15),
        lambda data: shard(data).update(document_count=-1),
        lambda data: shard(data).pop("exact"),
        lambda data: shard(data).update(more=1),
        lambda data: data.update(splits=[]),
    ],
    ids=["tokens", "documents", "missing", "more", "splits"],
)
def test_a_manifest_that_does_not_fit_its_files(corpus, change):
    manifest(corpus, change)
    with pytest.raises(UserError, match="damaged"):
        open_dataset(DataConfig(str(corpus)))


# ---- configs


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("scheme", "name"), "os.system"),
        (("scheme", "name"), "../../nag"),
        (("scheme", "name"), ["nag"]),
        (("scheme", "__class__"), "subprocess.Popen"),
        (("model", "__init__"), {"code": 1}),
        (("train", "steps"), "__import__('pathlib').Path('CANARY').touch()"),
        (("train", "steps"), {"__reduce__": ["os.system", "touch CANARY"]}),
        (("!python/object/apply:os.system",), ["touch CANARY"]),
    ],
    ids=str,
)
def test_a_config_cannot_run_code(tmp_path, path, value):
    canary = tmp_path / "canary"
    values = to_dict(RunConfig(find_scheme("nag")()))
    inner = values
    for name in path[:-1]:
        inner = inner[name]
    inner[path[-1]] = json.loads(json.dumps(value).replace("CANARY", str(canary)))
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(UserError):
        read_config(tmp_path)
    assert not canary.exists()


def test_a_pickled_config_is_not_a_config(tmp_path):
    (tmp_path / "config.json").write_bytes(pickle.dumps(Bomb(tmp_path / "canary")))
    with pytest.raises(UserError, match="cannot be read"):
        read_config(tmp_path)
    assert not (tmp_path / "canary").exists()


# ---- checkpoints


@pytest.fixture
def saved(tmp_path):
    state = TrainState(jnp.int32(1), {"w": jnp.ones(8)}, (), jnp.zeros(2, jnp.uint32), {}, new_guard())
    with Checkpoints(tmp_path / "saves") as checkpoints:
        checkpoints.save(1, state)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    return tmp_path / "saves", abstract


def files(folder):
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != CHECKPOINT_MANIFEST)


def test_a_pickle_in_the_place_of_any_file_of_a_checkpoint_runs_nothing(saved, tmp_path):
    """Not even if the manifest was renewed to match."""
    folder, abstract = saved
    for path in files(folder / "1"):
        content = path.read_bytes()
        path.write_bytes(bomb(tmp_path / "canary"))
        with Checkpoints(folder) as checkpoints, pytest.raises(UserError, match="is damaged"):
            checkpoints.newest()
        write_manifest(folder / "1", {})
        with Checkpoints(folder) as checkpoints:
            try:
                checkpoints.restore(abstract, checkpoints.newest())
            except UserError:
                pass  # refused, or not read at all
        assert not (tmp_path / "canary").exists(), path
        path.write_bytes(content)
    write_manifest(folder / "1", {})
    with Checkpoints(folder) as checkpoints:
        assert float(checkpoints.restore(abstract).params["w"].sum()) == 8.0


def test_names_of_classes_in_a_checkpoint_are_not_imported(saved, tmp_path, monkeypatch):
    folder, abstract = saved
    (tmp_path / "evil_module.py").write_text(f"import pathlib\npathlib.Path({str(tmp_path / 'canary')!r}).touch()\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    tried = 0
    for path in files(folder / "1"):
        text = path.read_bytes()
        if b"orbax.checkpoint." in text:
            tried += 1
            path.write_bytes(text.replace(b"orbax.checkpoint.", b"evil_module."))
            write_manifest(folder / "1", {})
            with Checkpoints(folder) as checkpoints:
                try:
                    checkpoints.restore(abstract)
                except UserError:
                    pass
            path.write_bytes(text)
    assert tried and not (tmp_path / "canary").exists()


def test_a_checkpoint_with_a_link_for_a_file_is_damaged(saved, tmp_path):
    folder, _ = saved
    path = next(p for p in files(folder / "1") if p.stat().st_size)
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with Checkpoints(folder) as checkpoints, pytest.raises(UserError, match="is missing"):
        checkpoints.newest()
