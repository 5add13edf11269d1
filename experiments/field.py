"""Every residual scheme there was, at 64 and 128 blocks, on equal terms.

Claim: At 64 and 128 blocks NAG is ahead of every other residual scheme, each at its best learning rate.
Source: this project's question; no comparison of these schemes at such depths is published. Partial ones: ProRes,
  arXiv:2603.05369; Keel, arXiv:2601.19895; DenseFormer, arXiv:2402.02622; SiameseNorm, arXiv:2602.08064; CompleteP,
  arXiv:2505.01618
Expected: nothing published for all together; in the partial ones ProRes is ahead of pre-norm, sandwich, DeepNorm and
  LayerNorm Scaling at 72 to 120 blocks, where LayerNorm Scaling fades; mean score of pre-norm / Keel 45.3 / 46.5 at 128
  sublayers and 57.9 / 60.9 at 1024, Keel's largest stable learning rate at 64 being 34, 29 and 12 times that of
  post-norm, DeepNorm and Mix-LN; perplexity of pre-norm / DenseFormer 17.82 / 17.12 at 72 blocks, of pre-norm /
  SiameseNorm (not in the library) 18.02 / 15.98 at 80; CompleteP reaches muP's loss at 179 blocks with 34% fewer FLOPs
Hardware: smoke and cpu: 2 CPU cores; h200: one GPU; paper: a TPU slice or 8 GPUs, one task per run
Time: smoke 8 s; cpu about an hour with --processes 2, less with JAX_COMPILATION_CACHE_DIR set, for the seeds share
  programs; h200 and paper not measured
Command: python -m experiments.field --processes 2

The schemes are those that the library had when this ran (`nag_harmonic` came later); sizes h200 and paper have 64
blocks alone. Width, batch and tokens are the same for all schemes. With --match flops all have the training FLOPs of
plain pre-norm at that depth instead; only matrix products are counted, not what mixes the lanes of a stream. Each
scheme has the initial values of its class. Time per step is the median in the runs themselves, whatever else the
machine did meanwhile; `stream` is what a block hands to the next one for each token, in bytes, which is kept for the
backward pass.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.harness.claims import Lowest
from experiments.harness.comparison import COMMON, Comparison, Measure, schemes
from experiments.harness.settings import Settings, crossed
from nagjax.residual import Boundary
from nagjax.runs.opening import open_run

PLAIN, JUDGED = "plain", "nag"
OTHERS = (  # those there were when it ran
    *("block_attn_res", "completep", "deepnorm", "denseformer", "depth_scaled", "highway", "highway_convex"),
    *("hyper_connections", "keel", "layer_norm", "layer_scale", "lns", "mhc", "mix_ln", "nag", "ngpt", "oru"),
    *("parallel", "peri_ln", "post_layer_norm", "post_ln", "prores", "reordered", "review", "rezero"),
    *("rezero_prenorm", "sandwich", "skip_init"),
)


def measured(folder: Path) -> dict[str, int]:
    """stream_bytes: of one token, between two blocks."""
    config = open_run(folder).config
    scheme, width = config.scheme, config.model.width

    def opened():
        rngs = nnx.Rngs(0)
        entry, ends = scheme.entry(width, rngs), scheme.ends(width, 1.0, rngs)
        here = (jnp.int32(0), jnp.int32(1), jnp.float32(1.0), config.model.sublayers)
        embedding = jnp.zeros((1, 1, width), config.model.compute_dtype)
        return scheme.open(embedding, Boundary(None, entry, *here), ends)

    return {"stream_bytes": sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(jax.eval_shape(opened)))}


GRID = (0.3, 1.0, 3.0)
SIZES = {
    "smoke": Settings(crossed((2,), 16, 16, 8, 4), 1, (PLAIN, JUDGED), (1.0,), eval_batches=1),
    "cpu": Settings(crossed((64, 128), 32, 32, 4, 50), 5, factors=GRID, eval_batches=12, looks=2),
    "h200": Settings(crossed((64,), 256, 512, 16, 1024), 1, factors=(1.0,), looks=2),
    "paper": Settings(crossed((64,), 256, 512, 128, 2048), 5, factors=GRID, looks=2),
}
COMPARISON = Comparison(
    schemes(PLAIN, *OTHERS),  # plain first: with --match flops its FLOPs are everybody's
    Lowest(JUDGED),
    "Residual schemes on equal terms, each at its best learning rate",
    measures=COMMON
    | {
        "step (s)": Measure("seconds per step", lambda run: run["step_seconds"]),
        "FLOPs": Measure("training FLOPs per token", lambda run: run["train_flops_per_token"]),
        "stream": Measure("bytes per token between blocks", lambda run: run["stream_bytes"]),
    },
    after=measured,
)


if __name__ == "__main__":
    from experiments.harness.command import main

    main(__file__)
