"""Residual schemes: the protocol, what schemes share, and the schemes themselves, one file each in `schemes/`."""

from nagjax.residual.protocol import Boundary, Scheme, Stream
from nagjax.residual.registry import find_scheme, register

__all__ = ["Boundary", "Scheme", "Stream", "find_scheme", "register"]
