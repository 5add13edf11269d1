"""Depth at equal width and tokens: does a scheme's lead over plain pre-norm grow with depth?

Claim: NAG beats plain pre-norm, and the gain grows with depth.
Source: Figliolia & Millidge 2026, arXiv:2606.16112; LayerNorm Scaling: Sun et al. 2025, arXiv:2502.05795; a sweep to
  120 blocks in which LayerNorm Scaling fades beyond 72: arXiv:2603.05369
Expected: NAG below plain at every depth, by more the deeper (no figures published); an independent dense
  re-implementation at equal FLOPs found NAG slightly behind, bits per byte of plain / NAG 0.899 / 0.938 at 26 blocks
  and 0.7503 / 0.7589 at 64
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: a TPU slice or 8 GPUs, one task per run
Time: smoke 15 s; cpu about an hour, baselines three hours, with --processes 2; longer two
  hours, after --reuse of the rates of other recipes; h200 and paper not measured
Command: python -m experiments.depth_scaling --processes 2

Width, batch and tokens are the same for all runs; parameters and FLOPs grow with depth. Schemes also differ by the cost
of their gates: Review takes a quarter more FLOPs than plain. The size baselines adds the baseline schemes to the four
of cpu (`field` has every scheme at 64 and 128 blocks). The size longer, 1M tokens, is below the 4-gram table. Its rates
are those of three other recipes, `--reuse five_schemes.cpu nag_start.cpu sixty_four_blocks.cpu`. Their seeds 1 to 6 had
shown NAG's lead shrink with depth, so this size has seeds from 7 on. It also has an arm of NAG whose step sizes start
at 1/l instead of 1/sqrt(l). "Grows" is the slope of the lead per doubling of the depth, fitted for every seed. With
`--tasks hellaswag`, a task of lm-evaluation-harness (extra `eval`, and its data), the table has the accuracy at every
depth, which Figliolia & Millidge report.
"""

import dataclasses

from experiments.harness.claims import Lead
from experiments.harness.comparison import Arm, Comparison, schemes
from experiments.harness.settings import Settings, crossed

FOUR = ("plain", "lns", "review", "nag")
BASELINES = (
    *("post_ln", "deepnorm", "mix_ln", "sandwich", "peri_ln"),
    *("layer_scale", "skip_init", "rezero", "depth_scaled"),
)
DEPTHS = (8, 16, 32, 64, 128)

CPU = Settings(crossed(DEPTHS, 32, 64, 8, 120), 5, FOUR, eval_batches=10, looks=10)
SIZES = {
    "smoke": Settings(crossed((2, 4), 16, 16, 8, 4), 1, ("plain", "nag"), (1.0,), eval_batches=1, looks=1),
    "cpu": CPU,
    "baselines": dataclasses.replace(CPU, arms=(*FOUR, *BASELINES)),
    "longer": Settings(
        crossed((16, 32, 64), 64, 128, 4, 2048), 5, ("plain", "nag", "nag-1"), eval_batches=128, first_seed=7
    ),
    "h200": Settings(crossed((16, 64), 256, 512, 16, 1024), 5, ("plain", "nag")),
    "paper": Settings(crossed((8, 16, 32, 64), 512, 1024, 64, 4096), 5, FOUR),
}
COMPARISON = Comparison(
    schemes(*FOUR, *BASELINES) | {"nag-1": Arm("nag", {"alpha_power": 1.0})},
    Lead("nag", "plain", along="depth", ahead=True),
    "Depth at equal width and tokens, each scheme at its best learning rate",
)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
