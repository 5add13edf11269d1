"""The other side of the interop tests: tiny random models of each family by transformers, and logits by PyTorch.

Run by a Python that has torch and transformers (no nagjax): `python -m tests.interop.reference FOLDER` saves each case
as FOLDER/CASE with logits.npz in it and prints `ready`; then each line `MODEL<tab>TOKENS.npz<tab>OUT.npz<tab>DTYPE` of
its input is answered with `done`, or with the error, once that model's logits, the loss where labels were given, and
the names of its float32 parameters are written. DTYPE is the computation's, `auto` that of the checkpoint.
"""

import pathlib
import sys
from collections.abc import Mapping

import numpy as np
import torch
import transformers

from tests.interop.reference_cases import BATCH, CASES, SHARDED, TOKENS, VOCAB


def randomise(model: torch.nn.Module) -> None:
    """Every parameter, norm gains and biases too, so that none is special."""
    generator = torch.Generator().manual_seed(0)
    for name, value in model.named_parameters():
        noise = torch.randn(value.shape, generator=generator)
        if value.ndim == 1:
            value.data = 0.3 * noise + (0.0 if name.endswith("bias") else 1.0)
        else:
            value.data = noise if "emb" in name or "wte" in name or "wpe" in name else noise * value.shape[-1] ** -0.5


@torch.no_grad()
def answers(model: torch.nn.Module, given: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    found = model.eval()(**{name: torch.from_numpy(own) for name, own in given.items()})
    wide = [name for name, value in model.named_parameters() if value.dtype == torch.float32]
    kind = {}
    if isinstance(found, tuple):
        kind = {"tuple": np.array(len(found))}
        found = transformers.modeling_outputs.CausalLMOutput(loss=found[0], logits=found[-1])
    loss = {"loss": found.loss.numpy()} if "labels" in given else {}
    return {"logits": found.logits.float().numpy(), "wide": np.array(wide, str)} | loss | kind


def auto(config: transformers.PretrainedConfig) -> type:
    masked = config.model_type in ("bert", "roberta", "xlm-roberta")
    return transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM


def build(folder: pathlib.Path, case: str) -> None:
    family, fields = CASES[case]
    config = getattr(transformers, f"{family}Config")(**fields)
    model = auto(config).from_config(config)
    randomise(model)
    if case.endswith("bfloat16"):
        model = model.to(torch.bfloat16)
    model.save_pretrained(folder / case, max_shard_size=SHARDED.get(case, "5GB"))
    if case.endswith("bfloat16"):  # the file's numbers, but not what else was rounded with them
        model = auto(config).from_pretrained(folder / case, dtype=torch.float32)
    tokens = np.random.default_rng(0).integers(0, VOCAB, (BATCH, TOKENS))
    if config.model_type.endswith("roberta"):
        tokens[tokens == config.pad_token_id] += 1  # whose positions it does not count
    np.savez(folder / case / "logits.npz", tokens=tokens, logits=answers(model, {"input_ids": tokens})["logits"])


def serve() -> None:
    for line in sys.stdin:
        model, tokens, out, dtype = line.rstrip("\n").split("\t")
        try:
            config = transformers.AutoConfig.from_pretrained(model, trust_remote_code=True)
            loaded = auto(config).from_pretrained(model, trust_remote_code=True, dtype=dtype)
            np.savez(out, **answers(loaded, np.load(tokens)))
            print("done", flush=True)
        except Exception as error:  # told to the test that asked
            print(f"{type(error).__name__}: {error}".replace("\n", " "), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    for case in CASES:
        build(pathlib.Path(sys.argv[1]), case)
    print("ready", flush=True)
    serve()
