"""Models by their name on the hub: from its local cache, fetched by its client, or refused with the command."""

import shutil
import sys
import types

import numpy as np
import pytest

import nagjax
from nagjax.cli import main
from nagjax.errors import UserError
from nagjax.interop.exporting import export
from nagjax.interop.hub import cache_folder, find_model
from nagjax.residual import find_scheme
from tests.interop.test_export import run_of

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """The hub's cache with the model owner/tiny, as its client lays it out: links to blobs."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    export(run_of(find_scheme("plain")(), tmp_path / "run"), tmp_path / "model")
    folder = tmp_path / "hub" / "models--owner--tiny"
    snapshot = folder / "snapshots" / COMMIT
    for part in (snapshot, folder / "blobs", folder / "refs"):
        part.mkdir(parents=True)
    (folder / "refs" / "main").write_text(COMMIT)
    for i, path in enumerate((tmp_path / "model").iterdir()):
        shutil.move(path, folder / "blobs" / str(i))
        (snapshot / path.name).symlink_to(f"../../blobs/{i}")
    return folder


def test_a_name_is_found_in_the_cache(cache, tmp_path, capsys):
    (cache / "snapshots" / COMMIT / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert find_model("owner/tiny") == find_model(f"owner/tiny@{COMMIT}") == cache / "snapshots" / COMMIT
    assert main(["import", "owner/tiny", "--out", "imported"]) == 0
    imported, loaded = nagjax.load("imported"), nagjax.load("owner/tiny")
    np.testing.assert_array_equal(imported.params["entry"]["gain"], loaded.params["entry"]["gain"])
    assert (tmp_path / "imported" / "chat_template.jinja").read_text() == "{{ messages[0].content }}"
    assert main(["export", "imported", "--out", "back"]) == 0
    assert (tmp_path / "back" / "chat_template.jinja").read_text() == "{{ messages[0].content }}"


def test_what_is_not_there_is_refused_with_the_command(cache, capsys):
    assert main(["import", "owner/other@v1.0", "--out", "imported"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert f"hub's cache {cache_folder()}" in said and "huggingface_hub is not installed" in said
    assert "pip install huggingface_hub && hf download owner/other --revision v1.0" in said
    with pytest.raises(UserError, match="nagjax import fetches it.*hf download owner/other$"):
        nagjax.load("owner/other")
    (cache / "snapshots" / COMMIT / "model.safetensors").unlink()
    with pytest.raises(UserError, match="hf download owner/tiny"):
        find_model("owner/tiny")


@pytest.mark.parametrize("missing", ["*.json", "*-00001-of-*", "*-of-*", "*[2-9]-of-*"])
def test_a_download_that_was_interrupted_is_not_taken_for_the_model(cache, tmp_path, monkeypatch, missing):
    """Of a model in shards, until all are there that the index names; what is not goes to the client, which resumes."""
    snapshot, sharded = cache / "snapshots" / COMMIT, tmp_path / "sharded"
    export(run_of(find_scheme("plain")(), tmp_path / "run"), sharded, shard_bytes=20_000)
    (snapshot / "model.safetensors").unlink()
    late = {path.name for path in sharded.glob(f"model{missing}")}
    for path in sharded.glob("model*"):
        if path.name not in late:
            shutil.copy(path, snapshot)
    with pytest.raises(UserError, match="hf download owner/tiny"):
        find_model("owner/tiny")
    client = types.SimpleNamespace(snapshot_download=lambda *_, **__: str(sharded))
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    assert find_model("owner/tiny", fetch=True) == sharded
    for name in late:
        shutil.copy(sharded / name, snapshot)
    assert late and find_model("owner/tiny", fetch=True) == snapshot


def test_the_hub_s_client_fetches(cache, monkeypatch):
    asked = []

    def snapshot_download(name, **options):
        asked.append((name, options["revision"]))
        if name == "owner/closed":
            raise RuntimeError("401\nmore")
        return str(cache / "snapshots" / COMMIT)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    assert find_model("owner/new@dev", fetch=True) == cache / "snapshots" / COMMIT
    assert find_model("owner/tiny", fetch=True) == cache / "snapshots" / COMMIT
    with pytest.raises(UserError, match=r"could not be fetched \(RuntimeError: 401\)"):
        find_model("owner/closed", fetch=True)
    assert asked == [("owner/new", "dev"), ("owner/closed", "main")]


def test_a_tokenizer_that_the_cache_lacks_is_fetched(cache, monkeypatch):
    """Of a model that another library has left there; where that fails, the model is there without it."""
    snapshot = cache / "snapshots" / COMMIT
    (snapshot / "tokenizer.json").rename(cache / "kept")
    assert find_model("owner/tiny") == find_model("owner/tiny", fetch=True) == snapshot

    def snapshot_download(name, **options):
        (cache / "kept").rename(snapshot / "tokenizer.json")
        return str(snapshot)

    monkeypatch.setitem(sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=snapshot_download))
    assert find_model("owner/tiny", fetch=True) == snapshot and (snapshot / "tokenizer.json").exists()


def test_a_repository_of_pickles_alone_is_told_so(cache, monkeypatch):
    """In the cache, and where the client fetches it, for which pickles are left where they are."""
    snapshot = cache / "snapshots" / COMMIT
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(UserError, match="source = 'owner/tiny'.*has no safetensors.*a pickle can run code"):
        monkeypatch.setitem(
            sys.modules, "huggingface_hub", types.SimpleNamespace(snapshot_download=lambda *_, **__: str(snapshot))
        )
        find_model("owner/tiny", fetch=True)
    (snapshot / "pytorch_model.bin").write_bytes(b"\x80\x04.")
    with pytest.raises(UserError, match="pytorch_model.bin: a pickle can run code"):
        nagjax.load("owner/tiny")
    with pytest.raises(UserError, match="has no safetensors"):  # not the cache's: the hub may have others by now
        find_model("owner/tiny", fetch=True)


def test_a_folder_that_is_not_there_is_no_name(cache, tmp_path):
    (tmp_path / "runs").mkdir()
    for path in ("runs/mine", "mine", "a/b/c", tmp_path / "x" / "y"):
        assert str(find_model(path, fetch=True)) == str(path)
    with pytest.raises(UserError, match="no such folder: give the folder of a run or a model"):
        nagjax.load("runs/mine")
