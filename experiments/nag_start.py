"""How large should NAG's rotations be at the start?

Claim: NAG with step sizes that start at 1/l has a lower loss than with 1/sqrt(l), at 16 and 32 blocks.
Source: Figliolia & Millidge 2026, arXiv:2606.16112, whose step size of sublayer l starts at l ** -1/2
Expected: at 32 blocks x 64 and 1M tokens on seeds 0 and 1: power 0.25 1.508 and 1.514, 0.5 1.456 and 1.493, 0.75 1.447
  and 1.476, 1 1.450 and 1.467; Review 1.456 and 1.450; nothing published
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: a TPU slice or 8 GPUs, one task per run
Time: smoke 20 s; cpu half an hour with --processes 2, after --reuse of what five_schemes has (estimated); h200 and
  paper not measured
Command: nice python -m experiments.nag_start --reuse five_schemes.cpu --processes 2
Known: cpu: four of the five seeds of NAG from 1/sqrt(l) and of Review

The step size alpha of a sublayer bounds the tangent of its rotation; it is learned, and starts at l ** -power. The
powers were chosen on seeds 0 and 1 of the size cpu, whose fresh seeds are 2 to 6. Beside the claim: Review, which has a
lower mean than NAG at 32 blocks (five_schemes).
"""

from experiments.harness.claims import Lowest
from experiments.harness.comparison import Arm, Comparison
from experiments.harness.settings import Settings, crossed

JUDGED = "nag-1"
ARMS = {
    "nag": Arm("nag", {"alpha_power": 0.5}),
    JUDGED: Arm("nag", {"alpha_power": 1.0}),
    "review": Arm("review"),
}
SIZES = {
    "smoke": Settings(crossed((2,), 16, 16, 8, 4), 1, ("nag", JUDGED), (1.0,), eval_batches=1, looks=1),
    "cpu": Settings(crossed((16, 32), 64, 128, 4, 2048), 5, eval_batches=128, first_seed=2),
    "h200": Settings(crossed((16, 32), 256, 512, 4, 1024), 5, eval_batches=128),
    "paper": Settings(crossed((16, 32), 512, 1024, 64, 4096), 5, eval_batches=80),
}
COMPARISON = Comparison(ARMS, Lowest(JUDGED, ("nag",)), "NAG by the size of its first rotations")


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
