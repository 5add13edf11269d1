"""Synthetic run folders whose derived facts are known by construction."""

import json
import math
from pathlib import Path

DEPTH = 4
SUBLAYERS = 2 * DEPTH


def train_line(step: int, loss: float | None, seconds: float = 0.5) -> dict:
    return {
        "kind": "train", "step": step, "tokens": 2048 * step, "loss": loss, "grad_norm": 1.0, "lr": 0.001,
        "tokens_per_second": 2048 / seconds, "step_seconds": seconds, "mfu": None,
    }  # fmt: skip


def eval_line(step: int, loss: float) -> dict:
    bits = loss / math.log(2)
    return {"kind": "eval", "step": step, "tokens": 2048 * step, "loss": loss, "bits_per_byte": bits}


def depth_line(step: int, *, growth_per_sublayer: float = 0.1, ratio: float = 0.1, dead: int = 0) -> dict:
    """The last `dead` sublayers have |t| = 0.01; sublayer j turns the stream by j degrees."""
    return {
        "kind": "depth", "step": step,
        "log_norm": [growth_per_sublayer * j for j in range(SUBLAYERS + 1)],
        "turn": [math.radians(j) for j in range(SUBLAYERS)],
        "ratio": [ratio] * (SUBLAYERS - dead) + [0.01] * dead,
        "gate": [0.5] * SUBLAYERS,
        "closed": [0.0] * SUBLAYERS,
    }  # fmt: skip


def final_lines(loss: float, steps: int = 10, **depth) -> list[dict]:
    """A run that falls from `loss + 1` to `loss` with compile time in its first three steps."""
    lines = []
    for step in range(1, steps + 1):
        lines.append(train_line(step, loss + 1 - step / steps, seconds=9.0 if step <= 3 else 0.5))
        if step % 5 == 0:
            lines += [eval_line(step, loss + 1 - step / steps), depth_line(step, **depth)]
    return lines


def write_run(
    folder: Path,
    lines: list[dict],
    *,
    scheme: str = "nag",
    lr: float | None = 0.008,
    seed: int = 0,
    depth: int = DEPTH,
    data: dict | None = None,
    sample: str | None = None,
    tail: str = "",
) -> Path:
    """Write a run folder; `tail` is put behind the lines as it is."""
    folder.mkdir()
    config = {
        "scheme": {"name": scheme},
        "model": {"depth": depth, "width": 64, "heads": 4, "vocab": 257, "context": 128},
        "optimizer": {"optimizer": "adamw", "lr": lr},
        "train": {"steps": 10, "batch": 16, "seed": seed},
        "data": data or {"corpus": "stdlib", "tokenizer": "bytes"},
        "mesh": {"data": 1, "fsdp": 1, "tensor": 1},
    }
    info = {
        "parameters": 1_530_000,
        "parameters_by_part": {"embedding": 16_448, "attention": 500_000, "mlp": 990_000},
        "train_flops_per_token": 9.21e6,
        "device": "cpu",
        "devices": 1,
        "versions": {"jax": "0.11.2"},
        "commit": None,
        "date": "2026-01-02",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "info.json").write_text(json.dumps(info))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines) + tail)
    if sample is not None:
        (folder / "sample.txt").write_text(sample)
    return folder
