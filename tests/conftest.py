"""Before jax is imported: the CPU, as eight devices. With pytest-xdist every worker comes through here itself.

What is compiled is kept in a folder of this run of the tests, which the workers and the processes they start share.
"""

import os
import shutil
import tempfile

DEVICES = 8
PROGRAMS = "JAX_COMPILATION_CACHE_DIR"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(DEVICES))
own_programs = None if PROGRAMS in os.environ else tempfile.mkdtemp(prefix="nagjax-programs-")
if own_programs:
    os.environ[PROGRAMS] = own_programs
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")

import jax  # noqa: E402
import pytest  # noqa: E402

if jax.config.jax_num_cpu_devices != DEVICES:
    jax.config.update("jax_num_cpu_devices", DEVICES)  # a plugin imported jax first


def pytest_unconfigure():
    if own_programs:
        shutil.rmtree(own_programs, ignore_errors=True)


@pytest.fixture(scope="module")
def quick_compile():
    """Compiles with little optimisation: half the time for programs that run a handful of steps."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
