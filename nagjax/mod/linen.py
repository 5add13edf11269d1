"""Mixture-of-Depths around a Linen residual."""

from collections.abc import Sequence

import jax
from flax import linen as nn
from flax import nnx
from jaxtyping import Array, Float, UInt32

from nagjax.errors import UserError
from nagjax.layers.where import Where
from nagjax.mod import module
from nagjax.residual.linen import LinenResidual, check_bound, nnx_residual, parameters
from nagjax.residual.module import Branch


class MixtureOfDepths(nn.Module):
    """`nagjax.MixtureOfDepths` around a Linen residual, which keeps its own parameters. The parameters of a router or a
    decider are "routing" in "params". Rows are [B, T, D]; arguments and errors are those of the nnx module."""

    residual: LinenResidual
    rate: float = 0.25
    router: str = "auto"
    decider: str = "threshold"

    def setup(self):
        if not isinstance(self.residual, LinenResidual):
            fix = "give a Linen module such as nagjax.linen.NAG(width, sublayers)"
            raise UserError("residual", type(self.residual).__name__, fix)

        def make(key: jax.Array) -> module.MixtureOfDepths:
            inner, rngs = nnx_residual(self.residual, key), nnx.Rngs(params=key)
            return module.MixtureOfDepths(inner, self.rate, rngs=rngs, router=self.router, decider=self.decider)

        self.graph, self.values = parameters(self, make, ("routing",))

    @property
    def routed(self) -> module.MixtureOfDepths:
        """The nnx module that uses this module's parameters. Raises UserError outside of init and apply."""
        check_bound(self)
        inner = dict(self.residual.values)
        return nnx.merge(self.graph, nn.unbox(dict(self.values) | ({"residual": inner} if inner else {})))

    def __call__(
        self,
        x: Float[Array, "B T D"],
        branches: Sequence[Branch],
        *,
        where: Where | None = None,
        progress: float | Float[Array, ""] | None = None,
        cuts: Float[Array, " S"] | None = None,
        causal: bool = False,
        noise: int | UInt32[Array, ""] | None = None,
    ) -> tuple[Float[Array, "B T D"], module.Routed]:
        return self.routed(x, branches, where=where, progress=progress, cuts=cuts, causal=causal, noise=noise)
