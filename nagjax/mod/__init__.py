"""Mixture-of-Depths: adaptive depth with static shapes.

`config` says which sublayers are routed; `routers/` score tokens and `deciders/` let them in causally, one file each;
`selection` chooses by score; `routed` runs a sublayer on the chosen tokens, for any residual scheme.
"""

from nagjax.mod.config import Group, ModConfig, kept

__all__ = ["Group", "ModConfig", "kept"]
