"""Turn a model of one of the families that nagjax reads into a run."""

import shlex
from pathlib import Path
from typing import Annotated, Literal

from nagjax.arguments import POSITIONAL
from nagjax.console import say
from nagjax.ranges import Count


def main(
    source: Annotated[Path, POSITIONAL],
    out: Path,
    context: Count | None = None,
    dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    devices: Count = 1,
) -> None:
    """Turn a model in safetensors into a run's folder, which eval, generate and the other commands can open. It may be
    Llama, SmolLM, Mistral, Mixtral, Qwen2, Qwen3, Gemma, OLMo, Phi, Granite, StableLM, StarCoder2, OPT, GPT-J,
    GPT-NeoX, Pythia, GPT-2, or a bundle that nagjax export has written; and, for analysis only, BERT or RoBERTa.

    Args:
        source: a folder with config.json and *.safetensors; or OWNER/NAME or OWNER/NAME@REVISION on the Hugging Face
            hub, read from its local cache or, if the package huggingface_hub is installed, downloaded.
        out: the run's folder, which must be new.
        context: maximum number of tokens in a sequence, if fewer than the model allows.
        dtype: dtype of the computation; parameters are float32.
        devices: split the parameters over this many of this machine's devices while reading them.
    """
    from nagjax.interop.hub import TWICE, find_model

    source = find_model(source, fetch=True, say=say)
    files = [path for path in source.glob("*.safetensors") if not path.match(TWICE)]
    weights = sum(path.stat().st_size for path in files if path.is_file())
    say(f"importing {source}, {weights / 2**30:.2f} GiB of weights, into {out}")
    from nagjax.data.tokenizer import NO_TOKENIZER, NoTokenizer
    from nagjax.interop.importing import import_model
    from nagjax.train.distributed.mesh import local_devices

    run = import_model(source, out, context=context, dtype=dtype, devices=local_devices(devices), say=say)
    name = shlex.quote(str(out))
    shown = [f"{run!r}", f"nagjax info {name}"]
    if isinstance(run.tokenizer, NoTokenizer):
        say(f"{NO_TOKENIZER}; without one it reads token ids only")
    else:
        causal = run.config.model.causal
        shown.append(f"nagjax generate {name} --prompt 'def '" if causal else f"nagjax map {name} --text 'a text'")
    print("\n  ".join(shown))
