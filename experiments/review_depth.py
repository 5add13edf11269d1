"""Convex against additive gates by depth: where the convex form stops learning, and the gradient at the first block.

Claim: With convex gates training fails beyond about 20 sublayers; with additive gates it does not.
Source: Kramer 2026, arXiv:2606.31859
Expected: convex near its start loss of 6.0 at 40 to 48 sublayers (GPT-2 BPE), additive improving with depth
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: 8 GPUs or a TPU slice
Time: smoke 25 s; cpu about 40 min with --processes 2; h200 and paper not measured
Command: python -m experiments.review_depth --processes 2

By the source, the gradient at the first layer vanishes with depth under convex gates, `h <- (1 - r) h + r u`, and does
not under additive ones, `h <- h + r u`.

Arms: Review Residuals, the same gate in convex form, and additive and convex Highway. The gradient is that of the mean
loss on one validation batch: its norm over the branch parameters of the first block, relative to the last block's, at
the start and at the end of training.
"""

from experiments.harness.claims import Wall
from experiments.harness.comparison import COMMON, Comparison, Measure, schemes
from experiments.harness.gradients import gradients  # registers review_convex too
from experiments.harness.settings import Settings, crossed


def _ratio(when: str):
    return lambda run: run[f"first_gradient_{when}"] / max(run[f"last_gradient_{when}"], 1e-30)


DEPTHS = (6, 10, 14, 24)  # blocks: half of the sublayers
SIZES = {
    "smoke": Settings(crossed((2,), 16, 16, 8, 4), 1, ("review_convex",), (1.0,), eval_batches=1, looks=1),
    "cpu": Settings(crossed(DEPTHS, 64, 128, 8, 150), 5, eval_batches=24, looks=3),
    "h200": Settings(crossed((6, 24), 512, 256, 64, 512), 5, ("review", "review_convex"), looks=3),
    "paper": Settings(crossed((6, 10, 14, 19, 24), 512, 256, 64, 8000, lr=2e-4), 5, looks=3),
}
COMPARISON = Comparison(
    schemes("review", "review_convex", "highway", "highway_convex"),
    Wall("review_convex", "review", beyond=10, margin=0.1),
    "Convex and additive gates by depth",
    measures=COMMON
    | {f"gradient {when}": Measure(f"gradient, first block / last, {when}", _ratio(when)) for when in ("start", "end")},
    after=gradients,
)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
