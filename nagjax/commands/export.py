"""A run as safetensors for transformers, or as a bundle."""

from pathlib import Path
from typing import Annotated, Literal

from nagjax.arguments import POSITIONAL
from nagjax.console import note


def main(
    run: Annotated[Path, POSITIONAL],
    out: Path,
    format: Literal["plain", "bundle"] = "plain",
    dtype: Literal["float32", "bfloat16"] = "float32",
) -> None:
    """Write a run as safetensors with config.json and tokenizer files.

    Args:
        run: a run folder.
        out: a new folder.
        format: plain, which transformers loads as one of its own models, if one of them is such a model; bundle,
            for any run whose scheme its adapter has, which nagjax.load reads, and transformers with
            trust_remote_code=True.
        dtype: dtype of the file; what gates compute with, but for their matrices, stays float32 in a bundle.
    """
    note(f"exporting {run}, into {out}")
    from nagjax.interop.exporting import export

    print(f"{export(run, out, format=format, dtype=dtype)}: {out}")
