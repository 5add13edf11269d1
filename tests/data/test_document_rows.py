"""Rows of one document each: cut off or padded, never two in one."""

import dataclasses
import json

import chex
import numpy as np
import pytest
from tokenizers import Tokenizer, processors

from nagjax.data import DataConfig, batches, load_tokenizer, open_dataset
from nagjax.data.rows import Rows
from nagjax.data.stream import TokenStream
from tests.data.test_batches import documents_of, joined, take


@pytest.mark.parametrize("kind", ["corpus", "bpe_corpus"])
@pytest.mark.parametrize("context", [1, 64, 5000])
def test_a_row_is_a_document(kind, context, request):
    dataset = open_dataset(DataConfig(path=request.getfixturevalue(kind), shuffle=False, rows="document"))
    documents, end = documents_of(dataset), dataset.tokenizer.end_of_text
    rows = joined(take(batches(dataset, batch=1, context=context), dataset.rows(context)))
    assert len(rows["targets"]) == len(documents) == dataset.document_count
    for i, document in enumerate(documents):
        kept = document[:context]
        n = len(kept)
        assert rows["targets"][i].tolist() == kept + [end] * (context - n)
        assert rows["tokens"][i].tolist() == [end, *kept[:-1]] + [end] * (context - n)
        assert rows["weights"][i].tolist() == rows["segment_ids"][i].tolist() == [1] * n + [0] * (context - n)
        assert rows["positions"][i].tolist() == [*range(n)] + [0] * (context - n)
    padding, cut = dataset.waste(context)
    assert padding == pytest.approx(1 - rows["weights"].mean())
    assert cut == pytest.approx(1 - rows["weights"].sum() / dataset.token_count)


def test_epochs_passes_and_processes(corpus):
    dataset = open_dataset(DataConfig(path=corpus, rows="document"))
    count = dataset.rows(50)
    whole = joined(take(batches(dataset, batch=7, context=50, repeat=False)))
    assert len(whole["targets"]) % 7 == 0 and whole["weights"].any(axis=1).sum() == count
    epochs = [joined(take(it, count)) for it in [batches(dataset, batch=1, context=50)] for _ in range(2)]
    for key in whole:
        assert sorted(row.tobytes() for row in epochs[0][key]) == sorted(row.tobytes() for row in epochs[1][key])
    assert not np.array_equal(epochs[0]["targets"], epochs[1]["targets"])
    halves = [take(batches(dataset, batch=4, context=50, process_index=p, process_count=2), 5) for p in (0, 1)]
    want = take(batches(dataset, batch=4, context=50), 5)
    chex.assert_trees_all_equal([joined(parts) for parts in zip(*halves, strict=True)], want)


def test_packed_rows_waste_only_the_end(corpus):
    dataset = open_dataset(DataConfig(path=corpus))
    padding, cut = dataset.waste(64)
    assert cut == 0 and 0 <= padding * dataset.rows(64) * 64 < 64


def test_documents_of_a_mixture(corpus, bpe_corpus, tmp_path):
    """Each corpus has one document per row, and all have the shape of one batch."""
    import shutil

    shutil.copytree(corpus, tmp_path / "same")
    dataset = open_dataset(DataConfig(mix=(f"{corpus}=1", f"{tmp_path}/same=2"), rows="document"))
    rows = joined(take(batches(dataset, batch=6, context=64), 20))
    assert (rows["segment_ids"].max(axis=1) == 1).all()


@pytest.mark.parametrize("kind", ["packed", "whole", "document"])
def test_what_a_tokenizer_puts_in_front_of_a_text_begins_each_document(kind, bpe_corpus, tmp_path):
    """But not what goes on from an earlier row, nor a document that begins with it by itself."""
    dataset = open_dataset(DataConfig(path=bpe_corpus, rows=kind))
    source, first = dataset.source(20), documents_of(dataset)[1][0]
    spec = json.loads(dataset.tokenizer.to_json())
    name = next(token for token, i in spec["model"]["vocab"].items() if i == first)
    engine = Tokenizer.from_str(json.dumps(spec))
    engine.post_processor = processors.TemplateProcessing(single=f"{name} $A", special_tokens=[(name, first)])
    (tmp_path / "front.json").write_text(engine.to_str())
    told = dataclasses.replace(dataset, tokenizer=load_tokenizer(str(tmp_path / "front.json"))).source(20)
    end, seen = dataset.tokenizer.end_of_text, set()
    for i in range(len(source)):
        before, after = source[i], told[i]
        opens = (before["segment_ids"] > 0) & (before["positions"] == 0) & (before["tokens"] == end)
        own = before["targets"] == first
        assert after["tokens"].tolist() == np.where(opens & ~own, first, before["tokens"]).tolist()
        assert all((after[key] == before[key]).all() for key in before.keys() - {"tokens"})
        seen |= {*zip(opens.tolist(), own.tolist(), strict=True)}
    assert len(seen) == 4


@pytest.mark.parametrize("begins", [None, 1])
def test_a_turn_that_ends_as_a_text_does_begins_none(begins):
    """The token in front of a row is that of a document which goes on, even where its last turn ended there."""
    end = 9
    documents = [[3, 4, 5, end, 6, 7, 8, end], [2, end, 2, end]]
    stream = TokenStream([(np.array(sum(documents, []), np.int32), np.array([[8, 8], [12, 4]]))], exact=True)
    rows = Rows(stream, 4, end, begins)
    front = end if begins is None else begins
    assert [rows[i]["tokens"].tolist() for i in range(3)] == [[front, 3, 4, 5], [end, 6, 7, 8], [front, 2, end, 2]]
