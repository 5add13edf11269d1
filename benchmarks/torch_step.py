"""The training step of nagjax's plain model in PyTorch, as a peer to be timed beside it: see benchmarks/step.py.

Pre-norm with RMSNorm, SwiGLU, rotary positions, unit-RMS queries and keys, AdamW with clipping, float32, the initial
values of the same sizes, attention by PyTorch's own kernel. Simpler than nagjax's step in two ways: a row is one
document, and no step is judged before it is taken.

Reads from its standard input how many steps to take and answers with seconds per step, until the input ends.
"""

import argparse
import json
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser(description=__doc__)
for name, default in {"depth": 24, "width": 64, "batch": 8, "context": 128, "vocab": 257, "threads": 2}.items():
    parser.add_argument(f"--{name}", type=int, default=default)
parser.add_argument("--heads", type=int, required=True)
parser.add_argument("--hidden", type=int, required=True)
parser.add_argument("--compiled", action="store_true")
EPSILON = 1e-6


def unit_rms(x):
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPSILON)


def matrix(rows: int, columns: int, scale: float = 1.0) -> nn.Parameter:
    """A parameter [out, in] with normal initial values of standard deviation scale / sqrt(in)."""
    return nn.Parameter(torch.randn(rows, columns) * scale * columns**-0.5)


class Block(nn.Module):
    def __init__(self, options):
        super().__init__()
        width, small = options.width, (2 * options.depth) ** -0.5
        self.heads = options.heads
        self.attention_gain, self.mlp_gain = (nn.Parameter(torch.ones(width)) for _ in range(2))
        self.qkv, self.out = matrix(3 * width, width), matrix(width, width, small)
        self.gate_up, self.down = matrix(2 * options.hidden, width), matrix(width, options.hidden, small)

    def forward(self, h, cos, sin):
        batch, tokens, width = h.shape
        joined = F.linear(unit_rms(h) * self.attention_gain, self.qkv)
        q, k, v = joined.view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        q, k = (turned(unit_rms(x), cos, sin) for x in (q, k))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, tokens, width)
        h = h + F.linear(mixed, self.out)
        gate, up = F.linear(unit_rms(h) * self.mlp_gain, self.gate_up).chunk(2, -1)
        return h + F.linear(F.silu(gate) * up, self.down)


def turned(x, cos, sin):
    first, second = x.chunk(2, -1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Model(nn.Module):
    def __init__(self, options):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(options.vocab, options.width))
        self.head = matrix(options.vocab, options.width, 0.5)
        self.gain = nn.Parameter(torch.ones(options.width))
        self.blocks = nn.ModuleList(Block(options) for _ in range(options.depth))

    def forward(self, tokens, targets, cos, sin):
        h = self.embedding[tokens]
        for block in self.blocks:
            h = block(h, cos, sin)
        return F.cross_entropy(F.linear(unit_rms(h) * self.gain, self.head).flatten(0, 1), targets.flatten())


def make_step(options):
    """A function that takes one step and returns the loss."""
    torch.manual_seed(0)
    model = Model(options)
    matrices = [p for name, p in model.named_parameters() if name.startswith("blocks") and p.ndim == 2]
    others = [p for name, p in model.named_parameters() if not (name.startswith("blocks") and p.ndim == 2)]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)
    half = options.width // options.heads // 2
    angle = torch.arange(options.context)[:, None] * 10_000.0 ** (-torch.arange(half) / half)
    tokens, targets = (torch.randint(options.vocab, (options.batch, options.context)) for _ in range(2))
    run = torch.compile(model) if options.compiled else model

    def step():
        loss = run(tokens, targets, angle.cos(), angle.sin())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    return step


def main() -> None:
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    step = make_step(options)
    step()
    step()
    print(json.dumps({"version": torch.__version__}), flush=True)
    for line in sys.stdin:
        began = time.perf_counter()
        for _ in range(int(line)):
            step()
        print((time.perf_counter() - began) / int(line), flush=True)


if __name__ == "__main__":
    main()
