"""Mixture-of-Depths at equal training FLOPs: skip more, train on more tokens.

Claim: At equal training FLOPs NAG with 20-25% of its (token, sublayer) pairs skipped matches the dense model.
Source: Figliolia & Millidge 2026, arXiv:2606.16112 (rates); Raposo et al. 2024, arXiv:2404.02258 (linear router)
Expected: loss at skipping rates of 20% and 25% at most 0.5% above that at rate 0; a random router clearly worse than
  NAG's own
Hardware: smoke and cpu: 2 CPU cores; h200, h200-350M: one H200; paper (150M): a TPU slice, one task per run
Time: smoke 15 s; cpu about 35 min with --processes 2; h200 and paper not measured
Command: python -m experiments.isoflop_mod --processes 2

All runs of a size have the same depth, width, batch and training FLOPs (closed form, tested against XLA's count), so a
run at a higher rate takes more steps, over more tokens, with the same schedule stretched. Arms: NAG by its own angle,
plain pre-norm by a linear router; as controls NAG by random choice, and NAG without every second or fourth block. The
loss is the validation loss under the causal decider (moving-average thresholds), as in sampling; the loss under top-k,
which looks at later tokens, stands beside it. Differences are paired by seed: same start, same data order. Step times
are measured in turn. All arms have their scheme's default learning rate, at which nothing is decided; `--factors` tunes
it.
"""

from experiments.harness.claims import Matches
from experiments.harness.comparison import COMMON, Arm, Measure
from experiments.harness.settings import Settings, Shape, preset
from experiments.harness.timed_comparison import TimedComparison
from nagjax.mod import ModConfig

RATES = (0.125, 0.2, 0.25, 0.375, 0.5)
ROUTERS = {"nag": ("nag", "nag"), "plain": ("plain", "linear"), "random": ("nag", "random")}  # scheme, router


def skipping(kind: str, rate: float) -> Arm:
    scheme, router = ROUTERS[kind]
    return Arm(scheme, model={"mod": ModConfig(rate=(rate,), router=router)})


def without_blocks(every: int) -> Arm:
    return Arm("nag", model={"mod": ModConfig(attention_rate=(1.0,), mlp_rate=(1.0,), every=every)})


ARMS = (
    {"nag": Arm("nag"), "plain": Arm("plain")}
    | {f"{kind}-{100 * rate:g}%": skipping(kind, rate) for kind in ROUTERS for rate in RATES}
    | {f"blocks-{100 / every:g}%": without_blocks(every) for every in (4, 2)}
)
FEW = ("nag", "nag-20%", "nag-25%", "nag-50%", "plain", "plain-25%", "plain-50%", "random-25%", "blocks-25%")
SHOWN = ("nag", "nag-50%", "random-25%", "blocks-25%", "plain", "plain-50%")


SIZES = {
    "smoke": Settings((Shape(2, 16, 32, 8, 6),), 1, ("nag", "nag-25%"), (1.0,), match="flops", eval_batches=1),
    "cpu": Settings((Shape(12, 64, 128, 8, 240),), 5, FEW, (1.0,), match="flops", looks=8),
    "h200": Settings(preset("60M", 8, 512), 5, FEW, (1.0,), match="flops"),
    "h200-350M": Settings(preset("350M", 64, 3000), 5, FEW, (1.0,), match="flops"),
    "paper": Settings(preset("150M", 64, 4000), 5, FEW, (1.0,), match="flops"),
}
COMPARISON = TimedComparison(
    ARMS,
    Matches("nag", ("nag-20%", "nag-25%"), margin=0.005),
    "Mixture-of-Depths at equal training FLOPs",
    match="flops",
    measures=COMMON
    | {
        "realised": Measure("rate realised", lambda run: run["mod_rate"]),
        "top-k loss": Measure("loss under top-k", lambda run: run["top_k_loss"]),
    },
    shown=SHOWN,
)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
