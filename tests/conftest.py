"""Before jax is imported: the CPU, as eight devices. With pytest-xdist every worker comes through here itself."""

import os

DEVICES = 8

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(DEVICES))

import jax  # noqa: E402
import pytest  # noqa: E402

if jax.config.jax_num_cpu_devices != DEVICES:
    jax.config.update("jax_num_cpu_devices", DEVICES)  # a plugin imported jax first


@pytest.fixture(scope="module")
def quick_compile():
    """Compiles with little optimisation: half the time for programs that run a handful of steps."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
