"""Before jax is imported: the CPU, as eight devices. With pytest-xdist every worker comes through here itself.

Programs run a handful of steps and compiling them is what tests cost, so XLA optimises little here, writes loops with
its older emitters, which take a third of the time, unless EMITTERS is `new` (tests/any_cpu.py), and writes a program in
one piece. What is compiled is kept in a folder of this run of the tests. The workers and the processes they start
share all of it.
"""

import gc
import os
import shutil
import tempfile

DEVICES = 8
MAPS = 35_000
PROGRAMS = "JAX_COMPILATION_CACHE_DIR"
FLAGS = {"--xla_cpu_parallel_codegen_split_count": "1"}
if os.environ.get("EMITTERS") != "new":
    FLAGS["--xla_backend_extra_options"] = "xla_cpu_disable_new_fusion_emitters"

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("JAX_NUM_CPU_DEVICES", str(DEVICES))
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join(given.split() + [f"{k}={v}" for k, v in FLAGS.items() if k not in given])
own_programs = None if PROGRAMS in os.environ else tempfile.mkdtemp(prefix="nagjax-programs-")
if own_programs:
    os.environ[PROGRAMS] = own_programs
    os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")

import jax  # noqa: E402

if jax.config.jax_num_cpu_devices != DEVICES:
    jax.config.update("jax_num_cpu_devices", DEVICES)  # a plugin imported jax first
done = 0  # tests
gc.set_threshold(50_000, 20, 20)  # tracing makes objects by the million, and few are garbage


def pytest_runtest_teardown():
    """A program takes some fifty memory maps for as long as it is kept, and a process that has more than the kernel's
    65,530 ends in a segmentation fault. So where they have become many, all programs are let go."""
    global done
    done += 1
    if done % 20:
        return
    try:
        with open("/proc/self/maps", "rb") as maps:
            many = sum(1 for _ in maps) > MAPS
    except OSError:  # no Linux: no such limit
        return
    if many:
        jax.clear_caches()
        gc.collect()


def pytest_unconfigure():
    if own_programs:
        shutil.rmtree(own_programs, ignore_errors=True)
