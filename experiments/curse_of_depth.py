"""The curse of depth: LayerNorm Scaling against other places of the norm, other sizes and other starts of the branch.

Claim: LayerNorm Scaling has a lower loss than Pre-LN and its other rivals: other norms, branch factors, scaled starts.
Source: Sun et al. 2025, arXiv:2502.05795, Tables 1, 6, 7, 8, and its released scripts
Expected: perplexity at 130M / 250M / 350M / 1B: LNS 25.76 / 20.35 / 18.20 / 15.71, Pre-LN 26.73 / 21.92 / 19.58 /
  17.02, Mix-LN 26.07 / 21.39 / 1363 / 1415, Post-LN 26.95 / 1410 / 1368 / 1391, DeepNorm 27.17 / 22.77 / 1363 / 1409
  (with the alpha of 32 blocks at every depth and an enlarged start: no evidence about DeepNorm); at 130M / 250M scaled
  start 26.04 / 20.98, LNS with it 25.80 / 20.79, depth-scaled start 26.95 / 21.50, SkipInit 27.41 / 22.29, LayerScale
  27.93 / 23.45; at 130M Sandwich-LN 26.51; the factor elsewhere 26.43 (MLP's norm), 26.53 (branch output), 26.89
  (attention's norm), 26.97 (in front of the norm, where it does nothing: noise is about 0.24), 1358 (residual). All are
  understated: the mean loss was multiplied by B/(B + 1), with B batches per rank, so 25.76 is about 25.9 and 20.35
  about 21.0. In another paper LNS is 0.2 to 0.6 ahead of Pre-LN at 50B tokens, and no longer ahead beyond 72 blocks,
  arXiv:2603.05369
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: 8 GPUs or a TPU slice, one task per run
Time: smoke 13 s; cpu about 50 min with --processes 2; h200 and paper not measured
Command: python -m experiments.curse_of_depth --processes 2

As in the source: Adam without weight decay or clipping, a cosine to 10%, SwiGLU, no QK-norm. Unlike the source:
parameters and optimizer are float32; initial values are the library's (matrices of variance 1/fan-in, an embedding of
unit scale; in the source 0.02 for all); documents are packed (in the source one per sequence); the corpus is whatever
is given; the learning rate is tuned for every arm, around that of the source or, at the small sizes, around the
scheme's default (in the source one rate serves all). The arms with the factor elsewhere are in
`experiments.harness.placements`. Variance: over the residual's features, mean over tokens, in front of every block and
behind the last. Damage: what leaving out one block, with no fine-tuning, adds to the loss on the first eighth of the
validation batches.
"""

import experiments.harness.placements  # noqa: F401 (registers the placements)
from experiments.harness.claims import Lowest
from experiments.harness.comparison import COMMON, Arm, Comparison, Measure, schemes
from experiments.harness.curse import use_of_depth
from experiments.harness.settings import Settings, Shape

JUDGED = "lns"
RIVALS = (
    *("pre_ln", "post_ln", "deepnorm", "mix_ln", "sandwich", "peri_ln"),
    *("layer_scale", "skip_init", "rezero", "scaled_start", "depth_scaled"),
)
ELSEWHERE = ("lns_on_mlp", "lns_on_branch", "lns_on_attention", "lns_before_norm", "lns_on_residual")
ARMS = schemes(JUDGED, *RIVALS, "lns_scaled_start", *ELSEWHERE) | {
    "pre_ln": Arm("plain", {"scaled_start": False}),
    "scaled_start": Arm("plain", {"scaled_start": True}),
}
PUBLISHED = (
    Shape(12, 768, 256, 512, 20_000, 2048, 12, 1e-3, title="130M"),
    Shape(24, 768, 256, 512, 40_000, 2560, 16, 1e-3, title="250M"),
    Shape(24, 1024, 256, 512, 60_000, 2736, 16, 5e-4, title="350M"),  # by the scripts; the paper says 1e-3
    Shape(24, 2048, 256, 512, 100_000, 5461, 32, 5e-4, title="1B"),
)
GRID = (0.3, 1.0, 3.0)
FEW_RIVALS = ("pre_ln", "mix_ln", "peri_ln", "rezero")
SIZES = {
    "smoke": Settings((Shape(4, 16, 16, 8, 4),), 1, ("lns_on_mlp",), (1.0,), eval_batches=1, looks=1),
    "cpu": Settings((Shape(16, 32, 64, 8, 80, title="small"),), 5, factors=GRID, eval_batches=16),
    "h200": Settings((Shape(24, 256, 512, 16, 512),), 5, (JUDGED, *FEW_RIVALS, "post_ln", "scaled_start"), GRID),
    "paper": Settings(PUBLISHED[:1], 5, (JUDGED, *FEW_RIVALS), GRID, eval_batches=80),
    "published": Settings(PUBLISHED, 5, factors=GRID, eval_batches=80),
}
COMPARISON = Comparison(
    ARMS,
    Lowest(JUDGED, RIVALS),
    "The curse of depth, each arm at its best learning rate",
    measures=COMMON
    | {
        "variance": Measure("variance of the residual", lambda run: run["variance"], log=True, profile=True),
        "damage": Measure("loss added without the block (nats per token)", lambda run: run["damage"], profile=True),
    },
    model={"qk_norm": False},
    optimizer={"weight_decay": 0.0, "beta2": 0.999, "clip": 0.0},
    after=use_of_depth,
)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
