"""The nagjax command."""

import errno
import importlib
import logging
import os
import sys
from collections.abc import Sequence

from nagjax.discovery import pick
from nagjax.errors import Preempted, UserError

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
FORBIDDEN = (errno.EACCES, errno.EPERM, errno.EROFS)

COMMANDS = {
    "demo": ("train", "demo", "train plain, LNS, Review and NAG on this machine and compare them"),
    "train": ("train", "train", "train one model, or go on training it"),
    "eval": ("look", "evaluate", "validation loss and depth of a run"),
    "generate": ("look", "generate", "continue prompts"),
    "info": ("look", "info", "parameters, FLOPs and memory of a run or a model"),
    "compare": ("look", "compare", "runs side by side in one table and one report"),
    "data": ("corpus", "data", "data prepare: documents into token shards"),
    "tokenizer": ("corpus", "tokenizer", "tokenizer train: learn a BPE tokenizer"),
    "plan": ("plan", "plan", "does a run fit a TPU slice or GPU box, and what would it cost: compiled without one"),
    "calibrate": ("depth", "calibrate", "how much of a dense NAG run can be skipped, and at what loss"),
    "map": ("depth", "draw_map", "which sublayers each token of a text goes through"),
    "import": ("interop", "import_", "a Llama, Mistral, Qwen, OLMo 2, GPT-NeoX or GPT-2 model becomes a run"),
    "export": ("interop", "export", "a run as safetensors for transformers, or as a bundle"),
    "diagnose": ("inside", "diagnose", "how much of a model's depth is used, and which blocks could go: a report"),
    "prune": ("inside", "prune", "take blocks out of a trained model, by rule or by list; what is left is a run"),
    "profile": ("profile", "profile", "trace a few training steps and tell which part of the model takes how long"),
    "bench": ("train", "bench", "bench step | compile | mod: step times, compile time, what skipping saves"),
}


def usage() -> str:
    lines = [f"  nagjax {name:10} {what}" for name, (_, _, what) in COMMANDS.items()]
    return "\n".join(["usage: nagjax COMMAND [OPTIONS]", "", *lines, "", "nagjax COMMAND --help lists its options."])


def run(args: Sequence[str]) -> None:
    """Runs one command; errors pass through."""
    if not args or args[0] in ("-h", "--help"):
        print(usage())
        return
    module, function, _ = pick("command", args[0], COMMANDS, "commands")
    getattr(importlib.import_module(f"nagjax.commands.{module}"), function)(args[1:])


def main(args: Sequence[str] | None = None) -> int:
    """Exit code 0, also after a run that SIGTERM asked to end; 2 after one line for bad input; 130 when interrupted."""
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # the libraries' own reports of errors that we report
    try:
        run(sys.argv[1:] if args is None else args)
    except UserError as error:
        return _fail(error)
    except OSError as error:
        if error.errno in FULL:
            fix = "free some space"
        elif error.errno in FORBIDDEN:
            fix = "choose a place you may write to"
        else:
            raise
        return _fail(UserError("file", error.filename, f"{os.strerror(error.errno)}: {fix}"))
    except KeyboardInterrupt:
        print("\nstopped; the same command goes on from the last checkpoint", file=sys.stderr)
        return 130
    except Preempted:
        return 0
    return 0


def _fail(error: Exception) -> int:
    print(f"nagjax: error: {' '.join(str(error).split())}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
