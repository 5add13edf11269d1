"""From text to batches: corpora, tokenizers, preparation, and the input pipeline. This package does not import jax."""

from nagjax.data.bpe import train_bpe
from nagjax.data.documents import read_documents
from nagjax.data.pipeline import DataConfig, Dataset, Mixture, batches, open_dataset
from nagjax.data.preparation import prepare
from nagjax.data.stdlib import stdlib_documents
from nagjax.data.store import Manifest, read_manifest, verify
from nagjax.data.tokenizer import ByteTokenizer, JsonTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "ByteTokenizer",
    "DataConfig",
    "Dataset",
    "JsonTokenizer",
    "Manifest",
    "Mixture",
    "Tokenizer",
    "batches",
    "load_tokenizer",
    "open_dataset",
    "prepare",
    "read_documents",
    "read_manifest",
    "stdlib_documents",
    "train_bpe",
    "verify",
]
