"""Is NAG the best of five schemes, at more than one depth and budget?

Claim: NAG has the lowest loss of five schemes at 16 blocks (1M and 2.1M tokens) and 32 blocks (1M).
Source: this project's tokens_and_depth, size arms, where NAG was first on every seed; Figliolia & Millidge 2026,
  arXiv:2606.16112, where plain pre-norm is the only rival at equal depth
Expected: NAG ahead of its nearest rival by 0.014 nats at 16 blocks and 1M tokens, as seen before the claim was fixed
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: a TPU slice or 8 GPUs, one task per run
Time: smoke 30 s; cpu five hours, after --reuse of what tokens_and_depth has; resumable; h200 and paper not measured
Command: nice python -m experiments.five_schemes --reuse tokens_and_depth.arms tokens_and_depth.longer --processes 2
Known: cpu: all losses at 16 blocks and 1M tokens, on these seeds, and those of plain and NAG at 2.1M

Plain has its scaled start; each scheme is at its best rate for each shape. Losses that were known before the claim
count with the rest, because a claim to be the lowest at every shape needs every shape. Runs above the 4-gram table of
their own text decide nothing.
"""

from experiments.harness.claims import Lowest
from experiments.harness.comparison import Comparison, schemes
from experiments.harness.settings import Settings, Shape, crossed

SIZES = {
    "smoke": Settings(crossed((2,), 16, 16, 8, 4), 1, ("plain", "nag"), (1.0,), eval_batches=1, looks=1),
    "cpu": Settings((*crossed((16,), 64, 128, 4, 2048, 4096), Shape(32, 64, 128, 4, 2048)), 5, eval_batches=128),
    "h200": Settings(crossed((16, 32), 256, 512, 4, 1024), 5, eval_batches=128),
    "paper": Settings((*crossed((16,), 512, 1024, 64, 4096, 8192), Shape(32, 512, 1024, 64, 4096)), 5, eval_batches=80),
}
COMPARISON = Comparison(
    schemes("plain", "lns", "review", "nag", "rezero_prenorm"),
    Lowest("nag"),
    "Five schemes, each at its best learning rate",
)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
