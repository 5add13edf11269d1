"""Does NAG's lead over plain at equal cost last as tokens grow?

Claim: At equal training FLOPs NAG from 1/l has a lower loss than plain after 1M, 2.1M and 4.2M tokens.
Source: this project's equal_flops, whose longest runs of plain have 2.7M tokens, and tokens_and_depth, whose runs of
  plain these are
Expected: in equal_flops NAG leads at 16 blocks x 64 by 0.017 where plain has 1.3M tokens, and by 0.029 where it has
  2.7M; at equal tokens NAG as published leads by 0.025 after 4.2M; nothing published
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: a TPU slice or 8 GPUs, one task per run
Time: smoke 15 s; cpu four hours beside other work, with --processes 2 and --reuse; resumable; h200 and paper not
  measured
Command: nice python -m experiments.equal_flops_tokens --reuse tokens_and_depth.longest --processes 2
Known: cpu: all runs of plain

Plain trains on the tokens that are named, and NAG from 1/l on 7% fewer, so that it costs as much. Each arm is at its
best rate. When the claim was fixed, no run of NAG from 1/l with these numbers of tokens had been made; on the same
seeds its lead at the budgets of equal_flops was known. Runs above the 4-gram table of their own text decide nothing.
"""

from experiments.harness.claims import Lowest
from experiments.harness.comparison import Comparison
from experiments.harness.settings import Settings, crossed
from experiments.sixty_four_blocks import ARMS as KNOWN

JUDGED = "nag-1-shorter"
ARMS = {"plain": KNOWN["plain"], JUDGED: KNOWN["nag-1"]}  # the first one's FLOPs are everybody's
SIZES = {
    "smoke": Settings(crossed((2,), 16, 16, 8, 4, 8), 1, factors=(1.0,), match="flops", eval_batches=1, looks=1),
    "cpu": Settings(crossed((16,), 64, 128, 4, 2048, 4096, 8192), 5, match="flops", eval_batches=128),
    "h200": Settings(crossed((64,), 256, 512, 16, 384, 768), 5, match="flops"),
    "paper": Settings(crossed((64,), 512, 1024, 64, 8192, 16_384), 5, match="flops", eval_batches=80),
}
COMPARISON = Comparison(
    ARMS,
    Lowest(JUDGED),
    "NAG from 1/l and plain at equal training FLOPs, by tokens, each at its best learning rate",
    match="flops",
)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
