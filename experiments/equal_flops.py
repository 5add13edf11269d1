"""Is what NAG and Review gain worth what they cost?

Claim: At equal training FLOPs NAG from 1/l has a lower loss than Review and plain, at 16 and 64 blocks.
Source: this project's sixty_four_blocks and nag_start, which compare at equal tokens; Review Residuals
  (arXiv:2606.31859) matches parameters
Expected: at equal tokens, 1M, NAG from 1/l, Review and plain have 1.477, 1.489 and 1.514 at 16 blocks x 64 and 1.438,
  1.439 and 1.479 at 64; judged by plain's gain from twice the tokens, 28% more tokens are worth 0.05 nats to it;
  nothing published
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: a TPU slice or 8 GPUs, one task per run
Time: smoke 15 s; with --processes 2 and --reuse of Review's runs: cpu three hours, longer (2.1M tokens) nine beside
  other work; h200 and paper not measured
Command: nice python -m experiments.equal_flops --reuse five_schemes.cpu sixty_four_blocks.cpu --processes 2
Known: cpu, longer: that NAG from 1/l leads at equal tokens on these seeds; Review's losses at 1M, and at 2.1M for 16
  blocks; of longer, most runs of cpu

Review takes 28% more training FLOPs for a token than plain, and NAG 7%. So plain and NAG train on more tokens until the
whole run costs what Review's does; `longer` in an arm's name marks these runs, as the same schemes have other runs at
Review's tokens. Each arm is at its best rate. When the claim was fixed, Review's losses on these seeds were known at 1M
tokens, and at 2.1M for 16 blocks; those of the other two at these budgets were not. Size longer, of 2.1M tokens, was
added when most runs of cpu were known. Runs above the 4-gram table of their own text decide nothing.
"""

from experiments.harness.claims import Lowest
from experiments.harness.comparison import Arm, Comparison
from experiments.harness.settings import Settings, crossed

JUDGED = "nag-1-longer"
ARMS = {  # the first one's FLOPs are everybody's
    "review": Arm("review"),
    "plain-longer": Arm("plain"),
    JUDGED: Arm("nag", {"alpha_power": 1.0}),
}
SIZES = {
    "smoke": Settings(crossed((2,), 16, 16, 8, 8), 1, factors=(1.0,), match="flops", eval_batches=1, looks=1),
    "cpu": Settings(crossed((16, 64), 64, 128, 4, 2048), 5, match="flops", eval_batches=128),
    "longer": Settings(crossed((16, 64), 64, 128, 4, 4096), 5, match="flops", eval_batches=128),
    "h200": Settings(crossed((16, 64), 256, 512, 4, 1024), 5, match="flops", eval_batches=128),
    "paper": Settings(crossed((16, 64), 512, 1024, 64, 4096), 5, match="flops", eval_batches=80),
}
COMPARISON = Comparison(
    ARMS, Lowest(JUDGED), "Three arms at equal training FLOPs, each at its best learning rate", match="flops"
)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
