"""Mixture-of-Depths: adaptive depth with static shapes.

`config` says which sublayers are routed; `routers/` score tokens and `deciders/` let them in causally, one file each;
`select` chooses by score; `routed` runs a sublayer on the chosen tokens, for any residual scheme.
"""

from nagjax.depth.config import Group, ModConfig, kept
from nagjax.depth.deciders import deciders
from nagjax.depth.routers import routers

__all__ = ["Group", "ModConfig", "deciders", "kept", "routers"]
