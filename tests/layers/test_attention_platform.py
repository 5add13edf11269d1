"""Which implementation "auto" attention chooses on other machines."""

import jax
import jax.numpy as jnp
import pytest

from nagjax.layers.attend import _best
from nagjax.layers.platform import tracing_for


@pytest.mark.parametrize(
    "platform, queries, keys, taken",
    [("tpu", 256, 256, "splash"), ("tpu", 128, 256, "splash"), ("tpu", 100, 100, "xla"), ("gpu", 256, 256, "cudnn")],
)
def test_the_platform_traced_for_decides(platform, queries, keys, taken):
    q, k = (jax.ShapeDtypeStruct((1, n, 4, 64), jnp.bfloat16) for n in (queries, keys))
    with tracing_for(platform):
        assert _best(q, k) == taken
    with tracing_for("tpu"):
        assert _best(q, k, causal=False) == "xla"
    assert _best(q, k) == "xla"  # this machine: a CPU
