# Written by python -m nagjax.stubs
from typing import ClassVar

from flax import nnx

from nagjax import data as data
from nagjax import generate as generate
from nagjax import interop as interop
from nagjax import layers as layers
from nagjax import linen as linen
from nagjax import measure as measure
from nagjax import mod as mod
from nagjax import model as model
from nagjax import plan as plan
from nagjax import report as report
from nagjax import residual as residual
from nagjax import runs as runs
from nagjax import train as train
from nagjax.generate.chat import answer as answer
from nagjax.generate.sample import complete as complete
from nagjax.interop.load import load as load
from nagjax.measure.probe import probe as probe
from nagjax.mod import ModConfig as ModConfig
from nagjax.mod.module import MixtureOfDepths as MixtureOfDepths
from nagjax.model.config import ModelConfig as ModelConfig
from nagjax.model.transformer import Transformer as Transformer
from nagjax.notebook import depth_map as depth_map
from nagjax.notebook import fit as fit
from nagjax.notebook import log as log
from nagjax.notebook import plot as plot
from nagjax.notebook import skip_curve as skip_curve
from nagjax.notebook import table as table
from nagjax.report.diagnosis import diagnose as diagnose
from nagjax.residual.module import Residual as Residual
from nagjax.residual.module import start_factors as start_factors
from nagjax.residual.registry import find_scheme as find_scheme
from nagjax.residual.registry import register as register
from nagjax.residual.registry import schemes as schemes
from nagjax.residual.schemes.block_attn_res import BlockAttnRes as _BlockAttnRes
from nagjax.residual.schemes.completep import CompleteP as _CompleteP
from nagjax.residual.schemes.deepnorm import DeepNorm as _DeepNorm
from nagjax.residual.schemes.denseformer import DenseFormer as _DenseFormer
from nagjax.residual.schemes.depth_scaled import DepthScaled as _DepthScaled
from nagjax.residual.schemes.highway import Highway as _Highway
from nagjax.residual.schemes.highway_convex import HighwayConvex as _HighwayConvex
from nagjax.residual.schemes.hyper_connections import HyperConnections as _HyperConnections
from nagjax.residual.schemes.keel import Keel as _Keel
from nagjax.residual.schemes.layer_norm import LayerNorm as _LayerNorm
from nagjax.residual.schemes.layer_scale import LayerScale as _LayerScale
from nagjax.residual.schemes.lns import LNS as _LNS
from nagjax.residual.schemes.mhc import MHC as _MHC
from nagjax.residual.schemes.mix_ln import MixLN as _MixLN
from nagjax.residual.schemes.nag import NAG as _NAG
from nagjax.residual.schemes.nag_harmonic import NAGHarmonic as _NAGHarmonic
from nagjax.residual.schemes.ngpt import NGPT as _NGPT
from nagjax.residual.schemes.oru import ORU as _ORU
from nagjax.residual.schemes.parallel import Parallel as _Parallel
from nagjax.residual.schemes.peri_ln import PeriLN as _PeriLN
from nagjax.residual.schemes.plain import Plain as _Plain
from nagjax.residual.schemes.post_layer_norm import PostLayerNorm as _PostLayerNorm
from nagjax.residual.schemes.post_ln import PostLN as _PostLN
from nagjax.residual.schemes.prores import ProRes as _ProRes
from nagjax.residual.schemes.reordered import Reordered as _Reordered
from nagjax.residual.schemes.review import Review as _Review
from nagjax.residual.schemes.rezero import ReZero as _ReZero
from nagjax.residual.schemes.rezero_prenorm import ReZeroPreNorm as _ReZeroPreNorm
from nagjax.residual.schemes.sandwich import Sandwich as _Sandwich
from nagjax.residual.schemes.skip_init import SkipInit as _SkipInit
from nagjax.train.own_model import constrain as constrain
from nagjax.train.own_model import decays as decays
from nagjax.train.own_model import optimizer as optimizer

__version__: str

class BlockAttnRes(Residual):
    """
    `x_l = RMSNorm_l(sum_i a_i v_i)`, `a = softmax_i(w_l . RMSNorm(v_i))` over the embedding, the summed updates of
    each earlier block, and the partial sum of the current block; each `f_l(x_l)` is added to its block's sum. The head
    reads in the same way. Kimi Team 2026, "Attention Residuals", arXiv:2603.15031, Block AttnRes.
    """

    Scheme: ClassVar[type[_BlockAttnRes]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        epsilon: float = ...,
        scaled_start: bool = ...,
        blocks: int = ...,
    ) -> None: ...

class CompleteP(Residual):
    """
    `h <- h + (L / base_depth)^-exponent f_l(RMSNorm_l(h))`, L the number of blocks.
    """

    Scheme: ClassVar[type[_CompleteP]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        epsilon: float = ...,
        base_depth: int = ...,
        exponent: float = ...,
    ) -> None: ...

class DeepNorm(Residual):
    """
    `h <- gain_l * unit(alpha h + f_l(h))`, `alpha = (2 L)^(1/4)`, L blocks, `unit(x) = x / rms(x)`. Wang et al.
    2022, arXiv:2203.00555, the rule for decoder-only models, with RMSNorm in place of LayerNorm; constants as in
    torchscale's decoder.
    """

    Scheme: ClassVar[type[_DeepNorm]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
    ) -> None: ...

class DenseFormer(Residual):
    """
    `X_i = block_i(Y_i-1)`, `Y_i = sum_j alpha_ij X_j`. The blocks are pre-norm. At an averaging point the sum is
    over the embedding X_0 and the points j <= i; elsewhere `Y_i = X_i`. Pagliardini et al. 2024, arXiv:2402.02622,
    Section 3.
    """

    Scheme: ClassVar[type[_DenseFormer]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        epsilon: float = ...,
        scaled_start: bool = ...,
        points: int = ...,
    ) -> None: ...

class DepthScaled(Residual):
    """
    `h <- h + f_l(RMSNorm_l(h))`; the output projections of block b = 1, 2, ... start at 1/sqrt(2 b) of their usual
    scale. This is the depth-scaled initialisation that arXiv:2502.05795 compares with (Table 6), after Zhang, Titov &
    Sennrich 2019, arXiv:1908.11365, who scale all matrices of a block by 1/sqrt(b).
    """

    Scheme: ClassVar[type[_DepthScaled]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
    ) -> None: ...

class Highway(Residual):
    """
    `r = sigmoid(W h + b)`; `h <- h + r * f(RMSNorm(h))`. Srivastava et al. 2015, in the additive form to which
    arXiv:2606.31859 compares Review Residuals. That paper decays the gates as it decays all parameters; here gates do
    not decay, unless `--decay` names them. W starts with the paper's standard deviation of 0.02 at every width and
    under every parametrization, so that W h has standard deviation 0.02 sqrt(D) for a state of unit RMS.
    """

    Scheme: ClassVar[type[_Highway]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
    ) -> None: ...

class HighwayConvex(Residual):
    """
    `h <- (1 - r) * h + r * f(RMSNorm(h))`, `r = sigmoid(W h + b)`.
    """

    Scheme: ClassVar[type[_HighwayConvex]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
    ) -> None: ...

class HyperConnections(Residual):
    """
    `H <- A_r^T H + B^T f_l(RMSNorm_l(A_m^T H))`, H [n, D], with `A = A_static + s tanh(norm(H) W)` for A_m [n, 1],
    A_r [n, n] and B [n]: dynamic Hyper-Connections (DHC), Zhu et al. 2024, arXiv:2409.19606, Section 2.
    """

    Scheme: ClassVar[type[_HyperConnections]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        epsilon: float = ...,
        scaled_start: bool = ...,
        streams: int = ...,
    ) -> None: ...

class Keel(Residual):
    """
    `h <- N'_l(S h + f_l(N_l(h)))`, S the number of sublayers; N, N' are RMSNorms, each with a gain of its own.
    """

    Scheme: ClassVar[type[_Keel]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        epsilon: float = ...,
    ) -> None: ...

class LayerNorm(Residual):
    """
    `h <- h + f_l(LN_l(h))`, `LN(h) = gain (h - mean(h)) / sqrt(var(h) + epsilon) + bias`.
    """

    Scheme: ClassVar[type[_LayerNorm]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        epsilon: float = ...,
        scaled_start: bool = ...,
    ) -> None: ...

class LayerScale(Residual):
    """
    `h <- h + lambda_l * f_l(RMSNorm_l(h))`, lambda_l [D]. Touvron et al. 2021 (CaiT), arXiv:2103.17239.
    """

    Scheme: ClassVar[type[_LayerScale]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        start: float | None = ...,
    ) -> None: ...

class LNS(Residual):
    """
    `x = RMSNorm(h) / sqrt(b)` for both sublayers of block b = 1, 2, ...; the final norm is not scaled.
    """

    Scheme: ClassVar[type[_LNS]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
    ) -> None: ...

class MHC(Residual):
    """
    `X <- H_res X + H_post^T f_l(RMSNorm_l(H_pre X))`, X [n, D], Xie et al. 2025, arXiv:2512.24880:
    """

    Scheme: ClassVar[type[_MHC]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        epsilon: float = ...,
        scaled_start: bool = ...,
        streams: int = ...,
    ) -> None: ...

class MixLN(Residual):
    """
    `h <- gain * unit(h + f_l(h))` in the first floor(post L) of L blocks, `h <- h + f_l(gain_l * unit(h))` in the
    rest, `unit(x) = x / rms(x)`; the head reads `gain * unit(h)`. Li et al. 2024, arXiv:2412.13795.
    """

    Scheme: ClassVar[type[_MixLN]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        post: float = ...,
    ) -> None: ...

class NAG(Residual):
    """
    The norm-agnostic residual network, Figliolia & Millidge 2026, arXiv:2606.16112, Eq. 3-18.
    """

    Scheme: ClassVar[type[_NAG]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        directions: int = ...,
        alpha_power: float = ...,
        ramp: float = ...,
    ) -> None: ...

class NAGHarmonic(Residual):
    """
    NAG with `alpha_l = 1/l` at the start instead of 1/sqrt(l) as in its source, Figliolia & Millidge 2026,
    arXiv:2606.16112.
    """

    Scheme: ClassVar[type[_NAGHarmonic]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        directions: int = ...,
        alpha_power: float = ...,
        ramp: float = ...,
    ) -> None: ...

class NGPT(Residual):
    """
    `h <- Norm(h + abs(alpha_l) (Norm(f_l(h)) - h))`, alpha_l [D] learned; logits `s_z <h, w_v>` with h and rows w_v
    of unit length.
    """

    Scheme: ClassVar[type[_NGPT]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        start: float = ...,
    ) -> None: ...

class ORU(Residual):
    """
    `h <- h + u - (<h, u> / (<h, h> + epsilon)) h`, `u = f_l(RMSNorm_l(h))`: only the orthogonal part is written.
    """

    Scheme: ClassVar[type[_ORU]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        epsilon: float = ...,
        scaled_start: bool = ...,
    ) -> None: ...

class Parallel(Residual):
    """
    `h <- h + attention(LN_1(h)) + mlp(LN_2(h))`: GPT-NeoX (Black et al. 2022, arXiv:2204.06745, Section 2.1); GPT-J
    has one norm for both.
    """

    Scheme: ClassVar[type[_Parallel]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        epsilon: float = ...,
        scaled_start: bool = ...,
    ) -> None: ...

class PeriLN(Residual):
    """
    `h_0 = gain_0 * unit(e)`, `h <- h + gain'_l * unit(f_l(gain_l * unit(h)))`, `unit(x) = x / rms(x)`. Kim et al.
    2025, arXiv:2502.02732.
    """

    Scheme: ClassVar[type[_PeriLN]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
    ) -> None: ...

class Plain(Residual):
    """
    `h <- h + f_l(RMSNorm_l(h))`. Pre-LN with RMSNorm (Zhang & Sennrich 2019; Xiong et al. 2020).
    """

    Scheme: ClassVar[type[_Plain]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        epsilon: float = ...,
        scaled_start: bool = ...,
    ) -> None: ...

class PostLayerNorm(Residual):
    """
    `h <- LN_0(embedding)`; `h <- LN_l(h + f_l(h))`, `LN(x) = gain (x - mean(x)) / sqrt(var(x) + epsilon) + bias`.
    """

    Scheme: ClassVar[type[_PostLayerNorm]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        epsilon: float = ...,
    ) -> None: ...

class PostLN(Residual):
    """
    `h <- gain_l * unit(h + f_l(h))`, `unit(x) = x / sqrt(mean(x^2) + epsilon)`. Vaswani et al. 2017,
    arXiv:1706.03762, with RMSNorm in place of LayerNorm.
    """

    Scheme: ClassVar[type[_PostLN]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
    ) -> None: ...

class ProRes(Residual):
    """
    `h <- h + a(b, t) f_l(RMSNorm_l(h))`, `a(b, t) = min(L t / (ramp b), 1)` for both sublayers of block b = 1 .. L;
    t is the share of the training done.
    """

    Scheme: ClassVar[type[_ProRes]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        ramp: float = ...,
    ) -> None: ...

class Reordered(Residual):
    """
    `h <- h + gain_l * f_l(h) / rms(f_l(h))`; the head reads `gain * h / rms(h)`.
    """

    Scheme: ClassVar[type[_Reordered]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        epsilon: float = ...,
    ) -> None: ...

class Review(Residual):
    """
    `r = sigmoid(W_h rms(h) + W_u rms(u) + b)`; `h <- h + r * u`, per channel.
    """

    Scheme: ClassVar[type[_Review]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        rank: int | None = ...,
    ) -> None: ...

class ReZero(Residual):
    """
    `h <- h + a_l f_l(h)`, a_l a learned number per sublayer, 0 at the start; the head reads h. Bachlechner et al.
    2020, arXiv:2003.04887.
    """

    Scheme: ClassVar[type[_ReZero]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
    ) -> None: ...

class ReZeroPreNorm(Residual):
    """
    `h <- h + a_l f_l(h / rms(h))`, a_l a learned number per sublayer, 0 at the start; the head reads h, without a
    norm. The gates are from Bachlechner et al. 2020, arXiv:2003.04887, the norm in the branch from Xiong et al. 2020,
    arXiv:2002.04745; the head without a norm is this project's choice.
    """

    Scheme: ClassVar[type[_ReZeroPreNorm]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        start: float = ...,
    ) -> None: ...

class Sandwich(Residual):
    """
    `h <- h + gain'_l * unit(f_l(gain_l * unit(h)))`, and a final norm. Ding et al. 2021 (CogView), arXiv:2105.13290,
    with RMSNorm in place of LayerNorm. The norm on a branch's output is applied before the addition; its gain starts at
    1.
    """

    Scheme: ClassVar[type[_Sandwich]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
    ) -> None: ...

class SkipInit(Residual):
    """
    `h <- h + a_l f_l(RMSNorm_l(h))`, a_l a learned number per sublayer. De & Smith 2020, arXiv:2002.10444.
    """

    Scheme: ClassVar[type[_SkipInit]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
        start: float | None = ...,
    ) -> None: ...
