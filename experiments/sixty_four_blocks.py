"""Which scheme is best at 64 blocks?

Claim: At 64 blocks Review has the lowest loss of six: plain, LNS, NAG from 1/sqrt(l) and from 1/l, pre-norm ReZero.
Source: this project's five_schemes and nag_start, where Review has the lowest mean at 32 blocks; Review Residuals:
  arXiv:2606.31859
Expected: at 32 blocks x 64 and 1M tokens Review 1.456, NAG 1.470, from 1/l 1.461 (other seeds), pre-norm ReZero 1.479,
  plain 1.492, LNS 1.527; nothing published
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: a TPU slice or 8 GPUs, one task per run
Time: smoke 30 s; with --processes 2: cpu seven hours beside other work, longer fourteen more (estimated); resumable;
  h200 and paper not measured
Command: nice python -m experiments.sixty_four_blocks --processes 2
Known: longer: all runs of 1M tokens, which are those of cpu

The claim was fixed before a run of 64 blocks at this budget was seen. Plain has its scaled start; each scheme is at its
best rate. NAG's step size of a sublayer is learned and starts at l ** -power. Runs above the 4-gram table of their own
text decide nothing. `longer`, with 2.1M tokens beside, takes the runs of 1M with `--reuse cpu`.
"""

from experiments.harness.claims import Lowest
from experiments.harness.comparison import Arm, Comparison, schemes
from experiments.harness.settings import Settings, crossed

ARMS = schemes("plain", "lns", "review", "nag", "rezero_prenorm") | {"nag-1": Arm("nag", {"alpha_power": 1.0})}
SIZES = {
    "smoke": Settings(crossed((2,), 16, 16, 8, 4), 1, ("review", "nag-1"), (1.0,), eval_batches=1, looks=1),
    "cpu": Settings(crossed((64,), 64, 128, 4, 2048), 5, eval_batches=128),
    "longer": Settings(crossed((64,), 64, 128, 4, 2048, 4096), 5, eval_batches=128),
    "h200": Settings(crossed((64,), 256, 512, 4, 1024), 5, eval_batches=128),
    "paper": Settings(crossed((64,), 512, 1024, 64, 4096), 5, eval_batches=80),
}
COMPARISON = Comparison(ARMS, Lowest("review"), "Six arms at 64 blocks, each at its best learning rate")


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
