"""Part `training`: first real trainings, 64 blocks of width 256 on BPE tokens, of plain, NAG, LNS and ReZero: on 10M
tokens each, then on 20M and 131M.

Each is a run as `nagjax train` makes it: it stops when the part's time is up, and the next call continues it. The
corpus is the source code of Python's standard library, read with a BPE tokenizer trained on it. Learning rates are the
schemes' defaults, and there is one seed: a first look, not a comparison.
"""

import functools
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

from benchmarks.parts.attention import working
from benchmarks.parts.rows import Case, Options, Paused
from nagjax.data import DataConfig, train_bpe
from nagjax.data.stdlib import stdlib_documents
from nagjax.errors import Preempted
from nagjax.model.config import ModelConfig
from nagjax.processes import alarm
from nagjax.residual import find_scheme
from nagjax.runs.config import RunConfig, TrainConfig
from nagjax.runs.log import load_run
from nagjax.train.loop import train

SCHEMES = ("plain", "nag", "lns", "rezero")
STEPS = (150, 300, 2000)
STARTING_SECONDS = 60  # to compile, until the first step
SAVING_SECONDS = 20  # left for the last checkpoint


def cases(options: Options) -> Iterator[Case]:
    for steps in (4,) if options.rehearsal else STEPS:
        for scheme in SCHEMES[:1] if options.rehearsal else SCHEMES:
            name = {"scheme": scheme, "size": "2x16" if options.rehearsal else "64x256", "steps": steps}
            yield Case(name, functools.partial(measure, scheme, steps, options), resumes=True)


def measure(scheme: str, steps: int, options: Options) -> dict:
    """Steps, tokens, validation loss (nats per token), bits per byte, and seconds per step of the finished run."""
    if time.monotonic() > options.deadline - SAVING_SECONDS - (0 if options.rehearsal else STARTING_SECONDS):
        raise Paused
    folder = options.scratch / f"{scheme}-{steps}"
    config = _config(scheme, steps, options)
    left = options.deadline - SAVING_SECONDS - time.monotonic()
    with alarm(max(left, 1.0), os.kill, os.getpid(), signal.SIGTERM):  # on this signal the trainer saves and ends
        try:
            train(config, folder)
        except Preempted:
            raise Paused(_figures(config, folder)) from None
    return _figures(config, folder)


def _figures(config: RunConfig, folder: Path) -> dict | None:
    """Of the run as far as it is; None before its first evaluation."""
    run = load_run(folder)
    if not run.evals.step.size:
        return None
    return {
        "attention": config.model.attention,
        "steps": config.train.steps,
        "tokens": run.step * config.train.batch * config.model.context,
        "loss": run.last_eval.loss,
        "bits_per_byte": run.last_eval.bits_per_byte,
        "step_seconds": run.step_seconds,
    }


def _config(scheme: str, steps: int, options: Options) -> RunConfig:
    if options.rehearsal:
        model, batch, vocab = ModelConfig(depth=2, width=16, context=16), 8, 300
    else:
        model, batch, vocab = ModelConfig(depth=64, width=256, context=512, remat="dots"), 128, 8192
    often = max(steps // 20, min(steps, 50))  # an evaluation takes about as long as two steps
    length = TrainConfig(steps=steps, batch=batch, eval_every=often, eval_batches=8, save_every=steps, keep=1)
    data = DataConfig(tokenizer=str(_tokenizer(options, vocab)))
    return RunConfig(find_scheme(scheme)(), working(model, batch), train=length, data=data)


def _tokenizer(options: Options, vocab: int) -> Path:
    path = options.scratch / f"bpe-{vocab}.json"
    if not path.exists():
        text = options.scratch / "stdlib.txt"
        documents = stdlib_documents()
        text.write_text("\n".join(documents[:20] if options.rehearsal else documents), encoding="utf-8")
        train_bpe([str(text)], vocab, path)
    return path
