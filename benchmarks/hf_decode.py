"""A random Llama-like model by transformers, and its greedy decoding, as a peer to be timed beside nagjax's: see
benchmarks/decode_peers.py.

Saves the model in a folder and says which versions it runs. Then each line of its standard input, a JSON object with
`prompts` (token ids, all of one length) and `tokens`, is answered with a line: the new tokens, and the seconds taken,
by the clock and of CPU time.
"""

import argparse
import json
import time
from pathlib import Path

import torch
import transformers

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--config", required=True, help="fields of LlamaConfig, as JSON")
parser.add_argument("--threads", type=int, required=True)
parser.add_argument("--dtype", default="float32")
parser.add_argument("--compiled", action="store_true", help="with a static cache, by torch.compile")


def build(folder: Path, fields: dict) -> None:
    """Saves a model with weights of such a spread that two tokens are seldom almost equally likely."""
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**fields))
    for name, value in model.named_parameters():
        if value.ndim == 2:
            value.data = torch.randn(value.shape) * (1.0 if "embed" in name else value.shape[-1] ** -0.5)
    model.save_pretrained(folder)


def main() -> None:
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if not options.folder.exists():
        build(options.folder, json.loads(options.config))
    model = transformers.LlamaForCausalLM.from_pretrained(options.folder, dtype=getattr(torch, options.dtype)).eval()
    extra = {}
    if options.compiled:
        how = transformers.CompileConfig(fullgraph=False, dynamic=False, mode="default")
        how._compile_all_devices = True  # else torch.compile leaves CPUs out
        extra = {"cache_implementation": "static", "compile_config": how}
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}), flush=True)
    while True:
        try:
            asked = json.loads(input())
        except EOFError:
            return
        prompts, count = torch.tensor(asked["prompts"]), asked["tokens"]
        length = {"max_new_tokens": count, "min_new_tokens": count}
        began, used = time.perf_counter(), time.process_time()
        with torch.inference_mode():
            whole = model.generate(
                prompts, attention_mask=torch.ones_like(prompts), do_sample=False, pad_token_id=0, **length, **extra
            )
        seconds = time.perf_counter() - began, time.process_time() - used
        print(json.dumps({"new": whole[:, prompts.shape[1] :].tolist(), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
