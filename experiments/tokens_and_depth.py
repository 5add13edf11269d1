"""Does NAG's lead over plain pre-norm last as tokens grow?

Claim: NAG's lead over plain pre-norm shrinks as training tokens grow.
Source: this project's question to Figliolia & Millidge 2026, arXiv:2606.16112
Expected: over earlier recipes, each at its own shape, plain minus NAG was 0.05 to 0.11 nats at 61k tokens, 0.059 at
  184k, 0.036 at 307k, -0.017 at 410k; nothing published
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: a TPU slice or 8 GPUs, one task per run
Time: smoke 30 s; cpu (16 blocks, 1M tokens, two arms) 45 minutes; arms (all five) an hour more; longer (two arms, and
  2.1M) 80 minutes more; longest (and 4.2M) three hours more; cpu16 (all five at the three) three hours more than
  the runs it reuses; cpu64 (the same at 64 blocks) twenty; all resumable; h200 and paper not measured
Command: nice python -m experiments.tokens_and_depth --processes 2
Known: longest, cpu16, cpu64: the runs at all budgets but the largest; of cpu16 all runs of plain and NAG

With `--reuse cpu` the sizes `arms` and `longer` take their runs of 1M tokens from the result file of `cpu`; likewise
`longest` with `--reuse longer`, `cpu16` with `--reuse longest five_schemes.cpu`, and `cpu64` with `--reuse
sixty_four_blocks.longer`, where 1M and 2.1M were seen before 4.2M. Plain has its scaled start. A table ranks all arms
at every shape. Runs that end above the 4-gram table of their own text decide nothing, which is why the width is 64 and
not 32 (experiments/LOG.md). Start it early and let it run beside other work: a stopped run goes on where it was.
"""

from experiments.harness.claims import Lead
from experiments.harness.comparison import Comparison, schemes
from experiments.harness.settings import Settings, crossed

SIZES = {
    "smoke": Settings(crossed((2,), 16, 16, 8, 4, 8), 1, ("plain", "nag"), (1.0,), eval_batches=1, looks=1),
    "cpu": Settings(crossed((16,), 64, 128, 4, 2048), 5, ("plain", "nag"), eval_batches=128),
    "arms": Settings(crossed((16,), 64, 128, 4, 2048), 5, eval_batches=128),
    "longer": Settings(crossed((16,), 64, 128, 4, 2048, 4096), 5, ("plain", "nag"), eval_batches=128),
    "longest": Settings(crossed((16,), 64, 128, 4, 2048, 4096, 8192), 5, ("plain", "nag"), eval_batches=128),
    "cpu16": Settings(crossed((16,), 64, 128, 4, 2048, 4096, 8192), 5, eval_batches=128),
    "cpu64": Settings(crossed((64,), 64, 128, 4, 2048, 4096, 8192), 5, eval_batches=128),
    "h200": Settings(crossed((64,), 256, 512, 16, 512, 1024), 5, ("plain", "nag")),
    "paper": Settings(crossed((64,), 512, 1024, 64, 8192, 16_384), 5, ("plain", "nag"), eval_batches=80),
}
COMPARISON = Comparison(
    schemes("plain", "lns", "review", "nag", "rezero_prenorm"),
    Lead("nag", "plain", along="tokens", sign=-1),
    "Loss by tokens, each scheme at its best learning rate",
)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
