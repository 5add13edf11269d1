"""Which schemes are trained on which meshes of eight devices: all on all with EVERY_MESH=1 (make test-meshes), else one
of every kind on the one of three axes, and few on the others."""

import os
from collections.abc import Iterable

import pytest

MESHES = {"data": (8,), "fsdp": (1, 8), "tensor": (2, 2, 2), "mixed": (2, 2, 1, 2), "sequence": (1, 1, 1, 8)}
EVERY = os.environ.get("EVERY_MESH", "") not in ("", "0")


def pairs(schemes: Iterable[str], meshes: Iterable[str], few: Iterable[str], usual: Iterable[str]) -> list:
    """Parameters `name, mesh`: the `few` schemes on all the meshes, the others on the `usual` ones or, asked to, on
    all."""
    meshes, few, usual = list(meshes), set(few), set(usual)
    return [
        pytest.param(name, MESHES[mesh], id=f"{name}-{mesh}")
        for name in schemes
        for mesh in meshes
        if EVERY or name in few or mesh in usual
    ]
