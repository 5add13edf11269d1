"""Fine-tuning from end to end: a model that transformers wrote learns conversations, and transformers loads what comes
of it."""

import json
import shutil

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

import nagjax
from nagjax.cli import main
from nagjax.runs.log import load_run
from tests.interop.parity import TOLERANCE, logits_of
from tests.interop.reference_cases import VOCAB

CASE = "qwen3"  # 3 blocks x 32
LETTERS = "abcdefghijklmnopqrstuvwxyz ?\n"
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TALKS = {"red?": "stop", "green?": "go on", "yellow?": "slow down", "blue?": "water", "white?": "snow", "grey?": "rain"}


def write_tokenizer(folder):
    """A token for each letter, fewer than the model has rows, and a template of conversations."""
    engine = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    engine.decoder = decoders.Fuse()
    engine.add_special_tokens([AddedToken(word, special=True) for word in SPECIAL])
    assert engine.get_vocab_size() < VOCAB
    (folder / "tokenizer.json").write_text(engine.to_str())
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": SPECIAL[2], "chat_template": CHATML}))


def write_talks(path, talks):
    path.write_text("".join(json.dumps({"prompt": asked, "response": said}) + "\n" for asked, said in talks.items()))
    return str(path)


@pytest.fixture(scope="module")
def imported(reference, tmp_path_factory):
    """The run of the imported model, and the corpus of its conversations; by the commands."""
    folder = tmp_path_factory.mktemp("fine")
    base, corpus = folder / "base", folder / "corpus"
    write_tokenizer(shutil.copytree(reference.folder / CASE, folder / "foreign"))
    assert main(["import", str(folder / "foreign"), "--out", str(base), "--dtype", "float32"]) == 0
    held_out = write_talks(folder / "held.jsonl", {"black?": "night"})
    told = ["data", "chat", write_talks(folder / "talks.jsonl", TALKS), "--tokenizer", str(base / "tokenizer.json")]
    assert main([*told, "--out", str(corpus), "--validation", "0", "--held-out", held_out]) == 0
    return base, corpus


WAYS = {"all": "--lr 0.003", "lora": "--lr 0.01 --lora.rank 4"}


@pytest.mark.parametrize("way", WAYS)
def test_an_imported_model_learns_conversations_and_goes_back(reference, imported, tmp_path, way):
    base, corpus = imported
    tuned, out = tmp_path / "tuned", tmp_path / "out"
    told = ["train", "--start", str(base), "--data.path", str(corpus), "--data.rows", "whole", "--out", str(tuned)]
    told += f"--batch 8 --steps 40 --eval-every 40 --eval-batches 1 --mesh.data 1 {WAYS[way]}".split()
    assert main(told) == 0
    losses = load_run(tuned).train.loss  # on answers alone
    assert losses[-1] < 0.8 * losses[0]

    assert main(["export", str(tuned), "--out", str(out)]) == 0
    assert (out / "chat_template.jinja").read_text() == CHATML
    tokens, before = reference.tokens(CASE), reference.logits(CASE)
    want = logits_of(nagjax.load(tuned), tokens)
    assert np.abs(reference.load(out, tokens) - want).max() < TOLERANCE
    assert np.abs(want - before).max() > 0.1
