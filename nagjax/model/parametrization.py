"""How initial values, learning rates, weight decay and epsilon depend on a model's width and depth, in one table.

m is width / base_width. n is depth / base_depth and a is the exponent of the scheme `completep`, which also weights
every update by n^-a. At m = n = 1 a model is the same under every parametrization. `standard` leaves all factors at 1;
its default peak learning rate is proportional to 1/width for every role. The table below is muP; CompleteP is muP times
the power of n.

                initial values   learning rate        AdamW's epsilon
    embedding   s                s                    1 / (m s)
    head        m^-1/2           1 / m                1
    matrix      1                1 / m     n^(a-1)    1 / m     n^-a
    vector      1                1         n^(a-1)    1 / m     n^-a

`matrix` is every parameter that sums over the features of the residual or of a branch: the hidden matrices, and a
gate's matrices that read the residual. `vector` is every gain, bias and other gate parameter, and what sums over one
head's features. The powers of n apply to parameters inside the blocks, not to those before the first or after the last
block (such as the head's norm).

Initial values are relative to those of `standard`, where matrices and head already start at 1/sqrt(width); with
`init_std` they are also multiplied by m^-1/2. s is the ratio of the scheme's initial embedding at this width to that at
base_width: 1 for most schemes, m^-1/2 for NAG, which reads only the direction. Weight decay is divided by the learning
rate's power of m, so that rate times decay is the same at every width. With Muon the rate of matrices goes with m^-1/2
instead: all singular values of its update are equal, not only a few large, and at this rate the update's spectral norm
is the same at every width.

muP: Yang et al. 2022, arXiv:2203.03466, Table 3 (it has no multipliers, so exports and decoding need not know of it);
Muon's rate: Yang, Simon & Bernstein 2023, arXiv:2310.17813. CompleteP: Dey et al. 2025, arXiv:2505.01618, Table 1, and
the authors' code for the norms (EleutherAI/nanoGPT-mup, `configure_optimizers`).

Attention's logits keep 1/sqrt(d_head): grow a model by more heads of the same width (the default from width 256 on).
"""

import dataclasses
from typing import TYPE_CHECKING

from nagjax.errors import UserError

if TYPE_CHECKING:  # a parser of options imports configs, and schemes import jax
    from nagjax.model.config import ModelConfig
    from nagjax.residual import Scheme

SUMMED = ("embed", "mlp", "heads")  # axes whose length is proportional to the width
ONE_HEAD = "head"  # an axis as long as one head, at every width


@dataclasses.dataclass(frozen=True)
class Factors:
    """The factors on the optimizer's settings for one parameter, given its role and place."""

    role: str
    rate: float = 1.0  # on the learning rate
    decay: float = 1.0  # on weight decay, where its role decays
    epsilon: float = 1.0  # on AdamW's epsilon
    inputs: tuple[int, ...] = (-2,)  # axes of a matrix that are summed over; further ones stack matrices
    outputs: tuple[int, ...] = (-1,)


@dataclasses.dataclass(frozen=True)
class Parametrization:
    """The table of this module for one model."""

    m: float = 1.0
    embedding: float = 1.0  # s
    n: float = 1.0
    exponent: float = 1.0

    @classmethod
    def of(cls, model: "ModelConfig", scheme: "Scheme") -> "Parametrization":
        """The parametrization of a model. Raises UserError if the chosen one does not apply to this scheme or model."""
        chosen = model.parametrization
        if chosen == "standard":
            return cls()
        if model.tied:
            fix = f"{chosen} starts and trains embedding and head in different ways: turn tied off"
            raise UserError("tied", True, f"{fix}, or use --parametrization standard")
        if scheme.constrains:
            fix = f"{scheme.name} puts matrices on a sphere after every step, which sets their size: use standard"
            raise UserError("parametrization", chosen, fix)
        m = model.width / model.base_width
        base, wide = (scheme.embedding_std(width) for width in (model.base_width, model.width))
        s = 1.0 if model.init_std else wide / base
        if chosen == "mup":
            return cls(m, s)
        if (depth := scheme.depth_ratio(model.sublayers_before // 2)) is None:
            fix = f"{scheme.name} governs depth by rules of its own, so that n^-a on top has no meaning"
            raise UserError("parametrization", chosen, f"{fix}: use --scheme completep, or --parametrization mup")
        return cls(m, s, *depth)

    @property
    def root(self) -> float:
        """m^-1/2: the factor on the head's initial values, and on `init_std`, which does not depend on the width by
        itself."""
        return self.m**-0.5

    def start(self, axes: tuple[str | None, ...]) -> float:
        """Factor on `init_std` for a matrix with these last axes."""
        return 1.0 if axes[-2] == ONE_HEAD else self.root

    def peak(self, model: "ModelConfig", scheme: "Scheme") -> float:
        """The scheme's default peak learning rate at the size where all factors are 1."""
        if model.parametrization == "standard":
            return scheme.default_rate(model.width, model.depth)
        return scheme.default_rate(model.base_width, max(round(model.sublayers_before / 2 / self.n), 1))

    def factors(
        self,
        role: str,
        axes: tuple[str | None, ...],
        *,
        muon: bool = False,
        own_rate: float = 1.0,
        in_block: bool = True,
    ) -> Factors:
        """The factors for a parameter of this role with these last axes. muon: whether Muon trains the matrices.
        own_rate: relative learning rate of the scheme's gates. in_block: whether the parameter belongs to a block."""
        if role == "adapter":  # an adapter starts from a trained model
            return Factors(role)
        kind = _kind(role, axes)
        by_muon = muon and role == "matrix"
        wide = {"embedding": self.embedding, "head": 1 / self.m, "matrix": self.m ** (-0.5 if by_muon else -1.0)}
        small = {"embedding": 1 / (self.m * self.embedding), "head": 1.0}
        deep = in_block and kind in ("matrix", "vector")
        rate = wide.get(kind, 1.0)
        return Factors(
            role,
            own_rate * rate * (self.n ** (self.exponent - 1.0) if deep else 1.0),
            1 / rate,
            small.get(kind, 1 / self.m) * (self.n**-self.exponent if deep else 1.0),
        )


def _kind(role: str, axes: tuple[str | None, ...]) -> str:
    """The parameter's row in the table."""
    if role == "gate":
        return "matrix" if {*axes} & {*SUMMED} else "vector"
    summed = axes[-2] if len(axes) > 1 else axes[0] if axes else None
    return "vector" if role == "norm" or summed == ONE_HEAD else role
