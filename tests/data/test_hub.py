import sys
import types

import numpy as np
import pytest

from nagjax.data import prepare, read_documents
from nagjax.data.hub import HubDataset
from nagjax.errors import UserError


def test_hub_without_its_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(UserError, match=r"pip install -e '\.\[hub\]'"):
        list(read_documents(["hub:someone/texts"]))


def test_hub_datasets(monkeypatch):
    asked = []

    def load_dataset(name, config, *, split, streaming):
        asked.append((name, config, split, streaming))
        if name == "someone/offline":
            raise ConnectionError("no network")
        return iter([{"text": "one"}, {"text": "two"}])

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    assert list(read_documents(["hub:someone/texts#small:test"])) == ["one", "two"]
    assert list(read_documents(["hub:someone/texts"])) == ["one", "two"]
    assert asked == [("someone/texts", "small", "test", True), ("someone/texts", None, "train", True)]
    with pytest.raises(UserError, match="no network.*folder"):
        list(read_documents(["hub:someone/offline"]))
    with pytest.raises(UserError, match=r"hub:someone/texts:1.*'body'"):
        list(read_documents(["hub:someone/texts"], field="body"))
    with pytest.raises(UserError, match=r"hub:someone/texts:1.*more than 2 characters"):
        list(read_documents(["hub:someone/texts"], longest=2))


@pytest.fixture
def commits(monkeypatch):
    """The hub's client: data sets of one document, which names the commit that is read."""
    at = {None: "a" * 40}

    def dataset_info(repository, *, revision, timeout):
        if revision not in at:
            raise ConnectionError
        return types.SimpleNamespace(sha=at[revision])

    def load_dataset(name, config, *, split, streaming, revision=None):
        return iter([{"text": f"{name} at {revision}"}])

    client = types.SimpleNamespace(HfApi=lambda: types.SimpleNamespace(dataset_info=dataset_info))
    monkeypatch.setitem(sys.modules, "huggingface_hub", client)
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    return at


def test_a_data_set_of_the_hub_is_read_at_one_commit(commits, tmp_path):
    made = prepare("hub:own/set", tmp_path / "now", validation=0.0)
    assert made.source["inputs"] == [["hub:own/set", None, "a" * 40]]
    tokens = np.fromfile(tmp_path / "now" / made.splits["train"][0].tokens.name, made.dtype)
    assert bytes(tokens[:-1].tolist()).decode() == f"own/set at {'a' * 40}"
    commits[None] = "b" * 40
    with pytest.raises(UserError, match=f"hub:own/set in inputs is now at b+: that one was hub:own/set@{'a' * 40}"):
        prepare("hub:own/set", tmp_path / "now", validation=0.0)
    assert prepare(f"hub:own/set@{'a' * 40}", tmp_path / "now", validation=0.0) == made
    commits.clear()  # no network: known by name
    assert prepare("hub:own/set", tmp_path / "now", validation=0.0) == made
    commits["main"] = "a" * 40
    assert prepare("hub:own/set@main", tmp_path / "now", validation=0.0) == made
    commits.clear()
    assert prepare("hub:own/set@main", tmp_path / "now", validation=0.0) == made
    commits[None] = "a" * 40
    for other in ("hub:own/set#de", "hub:own/set:test", "hub:own/other"):
        with pytest.raises(UserError, match="has changed, or was another file"):
            prepare(other, tmp_path / "now", validation=0.0)
    commits["v1"] = "c" * 40
    tagged = prepare("hub:own/set@v1#small:test", tmp_path / "tag", validation=0.0)
    assert tagged.source["inputs"] == [["hub:own/set#small:test", None, "c" * 40]]
    assert [str(HubDataset.of(name)) for name in ("hub:a/b", "hub:a/b@v1#c:d")] == ["hub:a/b", "hub:a/b@v1#c:d"]
