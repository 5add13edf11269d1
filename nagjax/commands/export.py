"""Write a run as safetensors for transformers, or as a bundle."""

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
        format: plain: one of transformers' own models, if one of them can express the run; bundle: any run whose scheme
            the bundle's adapter supports, to be loaded by nagjax.load, or by transformers with trust_remote_code=True.
        dtype: dtype of the tensors in the file; in a bundle, gate parameters that are not matrices stay float32.
    """
    note(f"exporting {run}, into {out}")
    from nagjax.interop.exporting import export

    print(f"{export(run, out, format=format, dtype=dtype)}: {out}")
