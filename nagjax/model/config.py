"""The shape of a model."""

import dataclasses
from typing import Annotated, Literal

from nagjax.errors import UserError
from nagjax.layers.config import GATED, BlockConfig, LoRAConfig, MoEConfig
from nagjax.mod.config import ModConfig
from nagjax.ranges import HIDDEN, Count, Fraction, Natural, Positive, Range, check_fields


def _round_up(value: float, multiple: int) -> int:
    return int(-(-value // multiple) * multiple)


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """The shape of a Transformer: a decoder unless `causal` is False. Fields that are None follow from `depth` and
    `width`."""

    depth: Annotated[int, Range(ge=1, le=2**16)] = 24  # blocks; each is an attention and an MLP sublayer
    width: Annotated[int, Range(ge=1, le=2**20)] = 64  # features of the residual stream (D)
    heads: Count | None = None  # query heads; None: width / 64, but at least 4; or 4, 2 or 1 if that does not fit
    kv_heads: Count | None = None  # key/value heads (grouped-query attention); None: the same as heads
    # hidden features of the MLP (F); None: if gated 8/3 D, rounded up to a multiple of 8, else 4 D
    hidden: Count | None = None
    context: Annotated[int, Range(ge=1, le=2**24)] = 128  # tokens per sequence
    vocab: Annotated[int, Range(ge=1, le=2**24), HIDDEN] = 257  # the commands take it from the corpus's tokenizer
    # activation of the MLP, gated (swiglu, geglu) or not; gelu and geglu use the tanh form of GELU
    mlp: Literal["swiglu", "geglu", "gelu", "gelu_exact", "relu"] = "swiglu"
    positions: Literal["rotary", "learned"] = "rotary"  # position encoding: rotary, or learned embeddings
    rope_base: Positive = 10_000.0  # base of the rotary frequencies; the longest wavelength is about 2 pi times this
    qk_norm: bool = True  # normalise queries and keys to unit RMS
    tied: bool = False  # use one table for embedding and head
    logit_softcap: Positive | None = None  # soft cap c on the head's logits: c tanh(logits / c)
    causal: Annotated[bool, HIDDEN] = True  # attention sees no later tokens; imported encoders see all of a document
    token_types: Annotated[Natural, HIDDEN] = 0  # kinds of tokens with an embedding of their own (BERT's sentences)
    # of a head with a linear map, the MLP's activation and LayerNorm before the table: the norm's epsilon
    head_epsilon: Annotated[Fraction | None, HIDDEN] = None
    # how initial values and learning rates depend on width and depth: see nagjax/model/parametrization.py
    parametrization: Literal["standard", "mup", "completep"] = "standard"
    base_width: Count = 64  # mup, completep: the width for which lr and the initial values are chosen
    # standard deviation of initial matrices and tables, which a scheme may scale; None: matrices 1 / sqrt(inputs)
    init_std: Positive | None = None
    # dtype of the computation; auto: float32 on CPU, else bfloat16
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    residual_dtype: Literal["auto", "float32"] = "auto"  # dtype of the residual stream; auto: that of the computation
    # what is recomputed in the backward pass. block: all of each block; dots: all but matmuls with weights; offload: as
    # block, with the residual stream stored in host memory
    remat: Literal["none", "block", "dots", "offload"] = "none"
    # implementation of attention; auto: chosen for the device; tokamax: GPU kernels from the package tokamax
    attention: Literal["auto", "xla", "cudnn", "splash", "tokamax"] = "auto"
    # implementation of the residual updates; auto: kernels for the device if they support the model, else xla
    kernels: Literal["auto", "reference", "xla", "mosaic_tpu", "pallas_triton", "mosaic_gpu", "triton"] = "auto"
    mod: ModConfig = ModConfig()  # Mixture-of-Depths
    block: BlockConfig = BlockConfig()  # parts that imported models may need
    moe: MoEConfig = MoEConfig()  # Mixture-of-Experts
    lora: LoRAConfig = LoRAConfig()  # adapters, the rest frozen
    kept: Annotated[tuple[Natural, ...], HIDDEN] = ()  # pruned model: its blocks' 0-based places before pruning
    depth_before: Annotated[Natural, HIDDEN] = 0  # blocks before pruning; 0: the model is not pruned

    def __post_init__(self):
        check_fields(self)
        if self.kept and (len(self.kept) != self.depth or list(self.kept) != sorted({*self.kept})):
            raise UserError("kept", self.kept, f"give the places of {self.depth} blocks in ascending order, or none")
        self.mod.rates(self.depth)  # raises its errors here
        fill = lambda field, value: object.__setattr__(self, field, value)  # noqa: E731 (frozen: derived defaults)
        if self.sublayers_before < 2 * (self.places[-1] + 1):
            raise UserError("depth_before", self.depth_before, f"give more than the last kept place, {self.places[-1]}")
        if self.block.others.places and self.block.others.places[-1] >= self.sublayers_before // 2:
            fix = f"give places below {self.sublayers_before // 2}, the number of blocks"
            raise UserError("block.others.places", self.block.others.places, fix)
        if self.heads is None:
            even = 2 if self.positions == "rotary" else 1
            wanted = (max(self.width // 64, 4), 4, 2, 1)
            fill("heads", next((h for h in wanted if self.width % (h * even) == 0), 1))
        if self.kv_heads is None:
            fill("kv_heads", self.heads)
        if self.hidden is None:
            fill("hidden", _round_up(8 / 3 * self.width, 8) if self.gated else 4 * self.width)
        if self.moe.experts:
            self._check_experts()
            if self.moe.hidden is None:
                each = _round_up((self.hidden or 0) / (self.moe.active + self.moe.shared), 8)
                fill("moe", dataclasses.replace(self.moe, hidden=each))
        heads, kv_heads = self.heads or 1, self.kv_heads or 1
        if self.block.head_width is None and self.width % heads:
            fits = [h for h in range(1, min(self.width, 256) + 1) if self.width % h == 0]
            nearest = min(fits, key=lambda h: abs(h - heads))
            raise UserError("heads", self.heads, f"width {self.width} must be divisible by heads; nearest: {nearest}")
        if heads % kv_heads:
            raise UserError("kv_heads", self.kv_heads, f"heads {self.heads} must be divisible by kv_heads")
        if self.positions == "rotary" and (self.rotated_width % 2 or not self.rotated_width):
            causes = {"block.rotated": self.block.rotated} if self.block.rotated != 1.0 else {}
            causes |= {} if self.block.head_width is None else {"block.head_width": self.block.head_width}
            causes |= {"width": self.width} if self.width % 2 else {"heads": heads}
            field = next(iter(causes))
            way = f"; try {self.width + heads}" if field == "width" else ""  # the next multiple of 2 heads
            fix = f"rotary needs an even head width, not {self.rotated_width}{way}"
            raise UserError(field, causes[field], fix)
        others = self.block.others
        own = "rope_base", self.rope_base, "block.rope", self.block.rope
        theirs = "block.others.rope_base", others.rope_base, "block.others.rope", others.rope
        for name, base, field, rope in (own, theirs):
            if rope.scaling == "yarn" and base <= 1.0:
                raise UserError(name, base, "yarn takes the logarithm of it: give a number above 1, such as 10000")
            if rope.scaling == "longrope" and len(rope.divisors) != self.rotated_width // 2:
                fix = f"longrope needs {self.rotated_width // 2}, one for each pair of features that rotary turns"
                raise UserError(f"{field}.divisors", rope.divisors, fix)
        if self.block.qk_gain != "none" and not self.qk_norm:
            raise UserError("block.qk_gain", self.block.qk_gain, "needs qk_norm: turn that on, or leave qk_gain out")

        if self.block.cca:
            self._check_compressed()
        if not self.causal:
            self._check_bidirectional()
        if self.attention == "tokamax" and self.mod.routes("attention") and self.mod.kv == "selected":
            fix = "its kernel takes stretches of keys, and selected ones have gaps: use --mod.kv all, or another one"
            raise UserError("attention", self.attention, fix)

    def check_causal(self, what: str) -> None:
        """Raises UserError if this model is not causal: `what`, a use of the model, needs causal attention."""
        if not self.causal:
            fix = f"{what} needs a model that sees no later tokens; use run.model, run.logits, nagjax diagnose or map"
            raise UserError("causal", False, fix)

    def check_id(self, field: str, i: int) -> None:
        """Raises UserError, for `field`, unless i is a token id of the vocabulary."""
        if not 0 <= i < self.vocab:
            raise UserError(field, i, f"the vocabulary has the ids 0 to {self.vocab - 1}")

    def check_logits(self, what: str) -> None:
        """Raises UserError if this model has no logits, which `what` needs: it is an encoder that came without a
        head."""
        if not self.causal and self.head_epsilon is None:
            fix = f"{what} needs a head for masked tokens, and the model came without one; use run.model, or nagjax map"
            raise UserError("head_epsilon", None, fix)

    def _check_bidirectional(self) -> None:
        rates = [field for field in ("rate", "attention_rate", "mlp_rate") if any(getattr(self.mod, field) or ())]
        without: dict[str, tuple[object, object]] = {
            f"mod.{field}": (getattr(self.mod, field), "Mixture-of-Depths is for causal attention: use 0")
            for field in rates
        } | {
            "block.window": (self.block.window, "a window counts back from the query: leave it out"),
            "block.others.window": (self.block.others.window, "a window counts back from the query: leave it out"),
            "block.cca": (self.block.cca, "its convolutions read the tokens before: leave it out"),
        }
        for field, (value, fix) in without.items():
            if value:
                raise UserError(field, value, f"with causal = False: {fix}")

    def _check_compressed(self) -> None:
        block = self.block
        if self.mod.routes("attention"):
            fix = "a convolution reads the token before, which may have skipped: use --mod.skip mlp, and leave "
            fix += "--mod.attention-rate and --mod.unit block out"
            raise UserError("mod.skip", self.mod.skip, f"block.cca: {fix}")
        if not self.qk_norm or block.qk_gain != "none":
            field, value = ("qk_norm", False) if not self.qk_norm else ("block.qk_gain", block.qk_gain)
            raise UserError(field, value, "block.cca normalises queries and keys and has a factor of its own for keys")
        if "qkv" in block.biases:
            raise UserError(
                "block.biases", block.biases, "block.cca has its biases behind the convolutions: leave qkv out"
            )
        if (self.kv_heads or 1) * self.head_width % 2:
            fix = "block.cca halves the values: give an even number of features to all key heads together"
            raise UserError("kv_heads", self.kv_heads, fix)

    def _check_experts(self) -> None:
        if "mlp" in self.block.biases:
            raise UserError("block.biases", self.block.biases, "experts have no biases: leave mlp out")
        if self.moe.skips and self.mod.routes("mlp"):
            fix = "tokens skip the MLP by --mod.rate already: use --mod.skip attention, without --mod.mlp-rate and "
            fix += "--mod.unit block, or --moe.skips 0"
            raise UserError("moe.skips", self.moe.skips, fix)

    def follows(self, field: str) -> bool:
        """Whether the field is a size, such as `hidden` or `moe.hidden`, whose value is the one that follows from the
        other fields."""
        if field not in ("heads", "kv_heads", "hidden", "moe.hidden"):
            return False
        try:
            untold = {"moe": dataclasses.replace(self.moe, hidden=None)} if field == "moe.hidden" else {field: None}
            return dataclasses.replace(self, **untold) == self
        except UserError:  # the size that follows does not fit the other fields
            return False

    @property
    def gated(self) -> bool:
        return self.mlp in GATED

    @property
    def head_width(self) -> int:
        return self.block.head_width or self.width // (self.heads or 1)

    @property
    def rotated_width(self) -> int:
        """Features of each head that rotary rotates."""
        return int(self.head_width * self.block.rotated)

    @property
    def compute_dtype(self):
        """dtype of the computation; "auto" is float32 if JAX's default backend is a CPU, else bfloat16."""
        import jax
        import jax.numpy as jnp

        if self.dtype == "auto":
            return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)
        return jnp.dtype(self.dtype)

    @property
    def stream_dtype(self):
        """dtype of the residual stream."""
        import jax.numpy as jnp

        return self.compute_dtype if self.residual_dtype == "auto" else jnp.dtype(self.residual_dtype)

    @property
    def sublayers(self) -> int:
        return 2 * self.depth

    @property
    def places(self) -> tuple[int, ...]:
        """Each block's 0-based place in the depth before pruning, which the scheme's depth factors use."""
        return self.kept or tuple(range(self.depth))

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The number of tokens that the attention of each block sees; None: all."""
        own, others = self.block.window, self.block.others
        return tuple(others.window if place in others.places else own for place in self.places)

    @property
    def sublayers_before(self) -> int:
        """The number of sublayers before pruning."""
        return 2 * (self.depth_before or self.places[-1] + 1)

    @property
    def indices(self) -> tuple[int, ...]:
        """Each sublayer's 1-based number before pruning."""
        return tuple(index for place in self.places for index in (2 * place + 1, 2 * place + 2))
