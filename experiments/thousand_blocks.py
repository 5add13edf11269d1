"""A thousand blocks on a laptop: does it train, and is it better than sixty-four?

Claim: With NAG from 1/l a model of 1,000 blocks has a lower loss than one of 64 at equal tokens.
Source: this project's question; ReZero: Bachlechner et al. 2020, arXiv:2003.04887, who train 10 000 fully connected and
  128 Transformer layers
Expected: nothing published for language models at equal tokens; a thousand blocks compile in the time of 12 and need
  the memory of one block's activations beside a stream per block
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: one GPU
Time: smoke 30 s; cpu an hour and a half on two cores (estimated from once: 5 to 11 min per run of 1,000 blocks), once
  an hour; h200 and paper not measured
Command: nice python -m experiments.thousand_blocks --processes 2

Blocks are scanned and recomputed in the backward pass, at both depths. Beside the losses: seconds to compile the step
at the run's depth and at 12 blocks, what the compiled step needs beside its arguments (XLA's count), and how far each
sublayer turns the stream at the end. The size `once` trains one seed at the schemes' default rates, to see whether it
can be done. It suggested the claim: NAG from 1/l was the only arm with a lower loss at 1,000 blocks. So the size `cpu`,
with the two arms that led, compares seeds from 2 on.
"""

from experiments.harness.claims import Deeper
from experiments.harness.comparison import COMMON, Comparison, Measure, schemes
from experiments.harness.compiled import compiled_and_turned
from experiments.harness.settings import Settings, crossed

REMAT = {"remat": "block"}
SIZES = {
    "smoke": Settings(crossed((2, 4), 16, 16, 8, 4, **REMAT), 1, ("nag_harmonic",), (1.0,), eval_batches=1, looks=1),
    "cpu": Settings(
        crossed((64, 1000), 32, 64, 4, 300, **REMAT),
        5,
        ("nag_harmonic", "rezero_prenorm"),
        eval_batches=40,
        looks=2,
        first_seed=2,
    ),
    "once": Settings(crossed((64, 1000), 32, 64, 4, 300, **REMAT), 1, factors=(1.0,), eval_batches=40, looks=2),
    "h200": Settings(crossed((64, 1000), 128, 256, 64, 500, **REMAT), 1, factors=(1.0,), looks=2),
    "paper": Settings(crossed((64, 1000), 256, 512, 128, 2000, **REMAT), 5, looks=2),
}
COMPARISON = Comparison(
    schemes("plain", "lns", "nag", "nag_harmonic", "rezero_prenorm"),
    Deeper("nag_harmonic"),
    "64 and 1,000 blocks at equal tokens",
    measures=COMMON
    | {
        "compile (s)": Measure("seconds to compile", lambda run: run["compile_seconds"]),
        "12 blocks (s)": Measure("seconds to compile 12 blocks", lambda run: run["compile_seconds_12"]),
        "memory (MB)": Measure("bytes beside the arguments", lambda run: run["temporary_bytes"] / 1e6),
        "turn": Measure(
            "turn of each sublayer (degrees)",
            lambda run: run["turn_degrees"],
            log=True,
            profile=True,
            along="sublayers",
        ),
    },
    after=compiled_and_turned,
)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
