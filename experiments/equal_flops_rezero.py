"""Is NAG from 1/l ahead of pre-norm ReZero, its nearest rival among those that cost no more than plain, at equal cost?

Claim: At equal training FLOPs NAG from 1/l has a lower loss than pre-norm ReZero, at 16 and 64 blocks.
Source: this project's equal_flops, whose budgets and NAG's runs these are, and sixty_four_blocks (at equal tokens)
Expected: at equal tokens, 1M, NAG from 1/l has 1.477 and pre-norm ReZero 1.502 at 16 blocks x 64, 1.438 and 1.463 at
  64; if 28% more tokens gave ReZero what they gave plain, it would have 1.446 and 1.406 here, where NAG has 1.441 and
  1.401
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: a TPU slice or 8 GPUs, one task per run
Time: smoke 15 s; with --processes 2 and --reuse: cpu two hours beside other work, longer (2.1M tokens,
  --reuse equal_flops.longer) four beside other work; h200 and paper not measured
Command: nice python -m experiments.equal_flops_rezero --reuse equal_flops.cpu --processes 2
Known: cpu, longer: NAG's losses and Review's on these seeds, but for one run each of longer

Pre-norm ReZero takes as many FLOPs as plain. NAG and ReZero train until they cost what Review does for 1M tokens, as in
equal_flops, each at its best rate. When the claim was fixed, NAG's losses and Review's at these budgets and seeds were
known, but for one run each of size longer; ReZero's were not. Runs above the 4-gram table of their own text decide
nothing.
"""

from experiments.equal_flops import ARMS as KNOWN
from experiments.equal_flops import JUDGED
from experiments.equal_flops import SIZES as SIZES
from experiments.harness.claims import Lowest
from experiments.harness.comparison import Arm, Comparison

RIVAL = "rezero_prenorm-longer"
ARMS = {"review": KNOWN["review"], JUDGED: KNOWN[JUDGED], RIVAL: Arm("rezero_prenorm")}
COMPARISON = Comparison(
    ARMS,
    Lowest(JUDGED, (RIVAL,)),
    "NAG from 1/l and pre-norm ReZero at equal training FLOPs, each at its best learning rate",
    match="flops",
)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
