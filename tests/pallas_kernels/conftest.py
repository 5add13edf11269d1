import jax
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, use_abstract_mesh

from tests.pallas_kernels.kernel_lowering import CUSTOM_CALL as CUSTOM_CALL


@pytest.fixture(scope="session")
def lower():
    """`lower(platform, fn, *args)`: the program text for an accelerator that is not there."""

    def run(platform: str, fn, *args) -> str:
        device = {
            "tpu": AbstractDevice("TPU v5 lite", 1, "tpu"),
            "cuda": AbstractDevice("NVIDIA H200", None, "gpu"),
        }.get(platform)
        mesh = AbstractMesh((), (), abstract_device=device) if device else AbstractMesh((), ())
        with use_abstract_mesh(mesh):
            return jax.jit(fn).trace(*args).lower(lowering_platforms=(platform,)).as_text()

    return run


@pytest.fixture(autouse=True)
def no_races(capsys):
    """Interpreters print the races that they find, and go on."""
    yield
    assert "RACE DETECTED" not in capsys.readouterr().out
