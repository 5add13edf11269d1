"""The README's example scheme works as printed, and stays short."""

import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

import nagjax
from nagjax.layers.attention import Where
from nagjax.model.config import ModelConfig
from nagjax.model.transformer import Transformer
from nagjax.residual import registry

README = (Path(__file__).parents[2] / "README.md").read_text()


def test_the_example_scheme_works():
    (example,) = (code for code in re.findall(r"```python\n(.*?)```", README, re.S) if "@register" in code)
    code = [line for line in example.splitlines() if line.strip()]
    assert len(code) <= 30
    try:
        exec(compile(example, "README.md", "exec"), {"__name__": "readme_example"})
        scheme = nagjax.find_scheme("tanh_gate")(start=0.0)
        config = ModelConfig(depth=2, width=16, vocab=11, context=8, dtype="float32")
        model = Transformer(config, scheme, nnx.Rngs(0))
        tokens = jnp.arange(16).reshape(2, 8) % 11
        output = model(tokens, Where.whole(2, 8), observed=True)
    finally:
        registry._registered.pop("tanh_gate", None)
    # A start of zero writes nothing: the head reads the normalised embedding.
    embedding = np.asarray(model.embedding.tokens[...])[np.asarray(tokens)]
    expected = embedding / np.sqrt(np.mean(embedding**2, axis=-1, keepdims=True))
    np.testing.assert_allclose(output.hidden, expected, atol=1e-4)
    assert jax.tree.all(jax.tree.map(lambda x: bool(jnp.all(jnp.isfinite(x))), output.telemetry))


def test_every_named_path_exists():
    root = Path(__file__).parents[2]
    named = re.findall(r"`((?:nagjax|pallas_kernels|experiments|benchmarks)/[\w./]*)`", README)
    missing = [path for path in named if not (root / path).exists() and "tanh_gate" not in path]
    assert named and not missing
