"""Mixture-of-Experts against one MLP, at equal training FLOPs.

Claim: NAG with 8 experts, of which a token runs 2, has a lower loss than dense NAG at equal FLOPs.
Source: Figliolia & Millidge 2026, arXiv:2606.16112 (NAG's own models are Mixture-of-Experts; dense ones of equal FLOPs
  are not reported); Fedus et al. 2021, arXiv:2101.03961 (ordinary residuals)
Expected: lower, from some tokens per parameter on; on few tokens experts see too little of the text each
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: a TPU slice or 8 GPUs, one task per run
Time: smoke 20 s; cpu 25 minutes with --processes 2; h200 and paper not measured
Command: python -m experiments.experts --processes 2

A token runs as many hidden features as in the dense model. Arms with experts make up for their routers' FLOPs by fewer
steps. Routing drops no tokens; the load-balance loss and z-loss are at their defaults. Beside the claim's arms: NAG
balanced by biases, and plain pre-norm, dense and with experts.
"""

from experiments.harness.claims import Lowest
from experiments.harness.comparison import Arm, Comparison
from experiments.harness.settings import Settings, Shape, preset
from nagjax.layers.config import MoEConfig

EIGHT = {"moe": MoEConfig(8, 2)}
BIASES = {"moe": MoEConfig(8, 2, score="sigmoid", load_weight=0.0, bias_rate=0.001)}
ARMS = {
    "nag": Arm("nag"),
    "nag-experts": Arm("nag", model=EIGHT),
    "nag-biases": Arm("nag", model=BIASES),
    "plain": Arm("plain"),
    "plain-experts": Arm("plain", model=EIGHT),
}


SIZES = {
    "smoke": Settings((Shape(2, 16, 32, 8, 6),), 1, ("nag", "nag-experts"), (1.0,), match="flops", eval_batches=1),
    "cpu": Settings((Shape(4, 64, 128, 8, 2000),), 5, ("nag", "nag-experts"), match="flops", eval_batches=64),
    "h200": Settings(preset("60M", 8, 512), 5, match="flops"),
    "paper": Settings(preset("150M", 64, 4000), 5, match="flops"),
}
COMPARISON = Comparison(
    ARMS, Lowest("nag-experts", ("nag",)), "Mixture-of-Experts at equal training FLOPs", match="flops"
)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
