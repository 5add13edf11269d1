"""Does what NAG gains from its start at 1/l last as tokens grow?

Claim: At 64 blocks and 1M to 4.2M tokens NAG from 1/l is ahead of NAG from 1/sqrt(l) and plain.
Source: Figliolia & Millidge 2026, arXiv:2606.16112, whose step size of sublayer l starts at l ** -1/2; this project's
  sixty_four_blocks and tokens_and_depth, whose runs of the other arms these are
Expected: at 64 blocks x 64 from 1/l 1.438 and 1.305 after 1M and 2.1M tokens, from 1/sqrt(l) 1.474 and 1.335, plain
  1.479 and 1.338; after 4.2M tokens plain and NAG from 1/sqrt(l) are known, from 1/l nothing is; nothing published
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: a TPU slice or 8 GPUs, one task per run
Time: smoke 30 s; cpu four hours with --processes 2 and --reuse; resumable; h200 and paper not measured
Command: nice python -m experiments.start_and_tokens --reuse sixty_four_blocks.longer tokens_and_depth.cpu64
Known: cpu: all runs but those from 1/l with 4.2M tokens

The claim was fixed before a run from 1/l with 4.2M tokens was seen. A step size is learned, and starts at l ** -power.
Each arm is at its best rate; runs above the 4-gram table of their own text decide nothing.
"""

from experiments.harness.claims import Lowest
from experiments.harness.comparison import Comparison
from experiments.harness.settings import Settings, crossed
from experiments.sixty_four_blocks import ARMS as KNOWN

JUDGED, RIVALS = "nag-1", ("nag", "plain")
SIZES = {
    "smoke": Settings(crossed((2,), 16, 16, 8, 4, 8), 1, (JUDGED, "nag"), (1.0,), eval_batches=1, looks=1),
    "cpu": Settings(crossed((64,), 64, 128, 4, 2048, 4096, 8192), 5, eval_batches=128),
    "h200": Settings(crossed((64,), 256, 512, 16, 384, 768), 5),
    "paper": Settings(crossed((64,), 512, 1024, 64, 8192, 16_384), 5, eval_batches=80),
}
COMPARISON = Comparison(
    {arm: KNOWN[arm] for arm in (JUDGED, *RIVALS)},
    Lowest(JUDGED, RIVALS),
    "NAG from 1/l and from 1/sqrt(l), and plain, by tokens, each at its best learning rate",
)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
