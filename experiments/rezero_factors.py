"""Which of its parts does pre-norm ReZero need? One is changed at a time.

Claim: Pre-norm ReZero needs all its parts: zero start, fast scalar gates, normalised branches, a head on the bare
  residual.
Source: this project's question; ReZero: Bachlechner et al. 2020, arXiv:2003.04887; SkipInit: De & Smith 2020,
  arXiv:2002.10444; LayerScale: Touvron et al. 2021, arXiv:2103.17239
Expected: seed 0 (seed 1) of 64 blocks x 32 at 61k tokens: pre-norm ReZero 2.417 (2.374), ReZero 2.440 (diverged),
  ReZero with a final norm diverged, SkipInit from 0 2.552; nothing published
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: a TPU slice or 8 GPUs, one task per run
Time: smoke 15 s; with --processes 2, estimated: cpu three hours, longer (16 blocks, 1M tokens) two; h200 and paper not
  measured
Command: nice python -m experiments.rezero_factors --processes 2
Known: longer: the runs of the unchanged scheme, which are those of tokens_and_depth, size arms

The changed arms are `experiments.harness.rezero_variants`: gates that start at 1/sqrt(blocks); gates at a twelfth of
the matrices' learning rate (as in NAG); a normalised head; norms with gains; a gate per feature; a centred residual;
and ReZero with no norm at all. The size `longer` is the one whose models end below the 4-gram table; with `--reuse
tokens_and_depth.arms` it takes the unchanged scheme's runs from there.
"""

import experiments.harness.rezero_variants  # noqa: F401 (registers the variants)
from experiments.harness.claims import Lowest
from experiments.harness.comparison import Comparison, schemes
from experiments.harness.settings import Settings, crossed

JUDGED = "rezero_prenorm"
SIZES = {
    "smoke": Settings(
        crossed((2,), 16, 16, 8, 4), 1, (JUDGED, "normed_head", "wide_gates"), (1.0,), eval_batches=1, looks=1
    ),
    "cpu": Settings(crossed((16, 64), 32, 64, 8, 240), 5, eval_batches=40),
    "longer": Settings(crossed((16,), 64, 128, 4, 2048), 5, eval_batches=128),
    "h200": Settings(crossed((64,), 256, 512, 4, 1024), 5, eval_batches=128),
    "paper": Settings(crossed((16, 64), 512, 1024, 64, 2048), 5),
}
VARIANTS = ("skip_started", "slow_gates", "normed_head", "with_gains", "wide_gates", "centred", "rezero")
COMPARISON = Comparison(
    schemes(JUDGED, *VARIANTS),
    Lowest(JUDGED, VARIANTS),
    "Pre-norm ReZero with one part changed",
)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
