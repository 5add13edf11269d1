"""What the families' config.json files have in common."""

import math

from nagjax.errors import UserError
from nagjax.interop.families import Inexpressible
from nagjax.layers.config import OtherBlocks, RopeConfig
from nagjax.model.config import ModelConfig
from nagjax.ranges import check_value, field_hints


def need(config: dict, *names: str) -> list:
    """Values that a config.json must have. Raises UserError naming the first it does not."""
    for name in names:
        if config.get(name) is None:
            raise UserError(f"config.json: {name}", None, "is missing: bring the model's own config.json back")
    return [config[name] for name in names]


def read_depth(config: dict) -> int:
    """Blocks, of which some families make lists before a ModelConfig checks them. Raises UserError."""
    (depth,) = need(config, "num_hidden_layers")
    check_value("config.json: num_hidden_layers", depth, field_hints(ModelConfig)["depth"])
    return depth


def only(config: dict, name: str, allowed: tuple, default: object) -> object:
    """A setting of which nagjax knows some values. Raises UserError for others."""
    value = config.get(name, default)
    if value not in allowed:
        raise UserError(f"config.json: {name}", value, f"cannot be imported; known: {', '.join(map(repr, allowed))}")
    return value


def read_sizes(config: dict, context: int, *, tied: bool = False, kv_heads: int | None = None) -> dict:
    """Of a ModelConfig, by the names that most families have. The arguments are for a config.json that leaves them
    out; without `kv_heads` there are as many as heads."""
    width, heads, hidden, vocab = need(config, "hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
    return {
        "depth": read_depth(config),
        "width": width,
        "heads": heads,
        "kv_heads": config.get("num_key_value_heads", kv_heads) or heads,
        "hidden": hidden,
        "vocab": vocab,
        "context": int(config.get("max_position_embeddings") or context),
        "tied": bool(config.get("tie_word_embeddings", tied)),
    }


def learned_positions(config: dict, default: int) -> int:
    """Positions that a table of learned ones has, whatever shorter context was asked for."""
    return int(config.get(LONGEST) or config.get("max_position_embeddings") or default)


def own_head_width(sizes: dict, width: int | None) -> int | None:
    """The width of a head, None where heads share the model's width, as they do unless a config.json says otherwise."""
    return None if width is None or width * sizes["heads"] == sizes["width"] else width


def write_sizes(model: ModelConfig) -> dict:
    """The inverse of `read_sizes`."""
    return {
        "vocab_size": model.vocab,
        "hidden_size": model.width,
        "intermediate_size": model.hidden,
        "num_hidden_layers": model.depth,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "max_position_embeddings": model.context,
        "tie_word_embeddings": model.tied,
    }


def read_rope(config: dict, context: int, base: float = 10_000.0) -> tuple[float, RopeConfig, float | None]:
    """Base, scaling, and share of the rotated features (None where it is not said), of old and new files."""
    given = rope_settings(config)
    base = float(given.get("rope_theta", config.get("rope_theta", base)))
    share = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return base, read_scaling(given, context, config.get(LONGEST) or context), share


def rope_settings(config: dict) -> dict:
    """`rope_parameters`, or `rope_scaling` of older files, which transformers prefers where a file has both. Raises
    UserError where the two differ."""
    given, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    if given and any(given.get("rope_type" if name == "type" else name) != value for name, value in old.items()):
        raise UserError("config.json: rope_scaling", old, f"rope_parameters says otherwise ({given}): keep one of them")
    return given or old


def read_whole_rope(config: dict, context: int, base: float = 10_000.0) -> tuple[float, RopeConfig]:
    """Base and scaling in families whose rotary turns all features of a head: of a share transformers makes nothing
    there, or an error where frequencies are scaled. Raises UserError where one is said."""
    base, rope, share = read_rope(config, context, base)
    if share not in (None, 1):
        raise UserError("config.json: partial_rotary_factor", share, "cannot be imported: this family's is 1")
    return base, rope


def read_scaling(given: dict, context: int, longest: int) -> RopeConfig:
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return RopeConfig()
    if kind == "linear":
        return RopeConfig("linear", factor=float(need(given, "factor")[0]))
    if kind not in ("llama3", "yarn", "longrope"):
        known = "default, linear, llama3, yarn, longrope"
        raise UserError("config.json: rope_type", kind, f"cannot be imported; known: {known}")
    original = int(given.get("original_max_position_embeddings") or longest)
    if kind == "longrope":
        return _longrope(given, original, context, longest)
    if kind == "llama3":
        names = ("factor", "low_freq_factor", "high_freq_factor")
        factor, low, high = (float(value) for value in need(given, *names))
        return RopeConfig("llama3", factor, low, high, original)
    only(given, "truncate", (True,), True)
    factor = float(given.get("factor") or longest / original)
    low, high = float(given.get("beta_slow") or 1.0), float(given.get("beta_fast") or 32.0)
    return RopeConfig("yarn", factor, low, high, original, _attention_factor(given, factor))


def _longrope(given: dict, original: int, context: int, longest: int) -> RopeConfig:
    """By the factors for a context up to the original one: those for a longer one would change the shorter ones too."""
    if context > original:
        fix = f"beyond {original:,} tokens all frequencies change, which a cache cannot: give --context {original}"
        raise UserError("config.json: rope_type", "longrope", fix)
    (short,) = need(given, "short_factor")
    factor, grown = float(given.get("factor") or longest / original), 1.0
    if factor > 1.0:
        grown = math.sqrt(1.0 + math.log(factor) / math.log(original))
    attention = given.get("attention_factor")
    divisors = tuple(map(float, short))
    own = grown if attention is None else float(attention)
    return RopeConfig("longrope", factor, original=original, divisors=divisors, attention=own)


def _attention_factor(given: dict, factor: float) -> float:
    """Of YaRN, on queries and keys."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    grown = lambda weight: 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0  # noqa: E731
    if given.get("mscale") and given.get("mscale_all_dim"):
        return grown(given["mscale"]) / grown(given["mscale_all_dim"])
    return grown(1.0)


def write_rope(model: ModelConfig) -> dict:
    """The fields of a config.json that `read_rope`, and any version of transformers, reads."""
    scaling = write_scaling(model.block.rope)
    return {"rope_theta": model.rope_base} | ({"rope_scaling": scaling} if scaling else {})


def write_scaling(rope: RopeConfig) -> dict | None:
    named = {"rope_type": rope.scaling, "factor": rope.factor}
    original = {"original_max_position_embeddings": rope.original}
    if rope.scaling == "longrope":
        raise Inexpressible("block.rope.scaling", rope.scaling, "its factors for longer contexts were not read")
    if rope.scaling != "yarn" and rope.attention != 1.0:
        raise Inexpressible("block.rope.attention", rope.attention, "only yarn has it")
    return {
        "none": None,
        "linear": named,
        "llama3": named | original | {"low_freq_factor": rope.low, "high_freq_factor": rope.high},
        "yarn": named | original | {"beta_slow": rope.low, "beta_fast": rope.high, "attention_factor": rope.attention},
    }[rope.scaling]


LONGEST = "longest"  # beside a config.json's fields: the context that it had before a shorter one was asked for
SLIDING, FULL = "sliding_attention", "full_attention"


def read_window(config: dict, context: int, default: int | None = None) -> dict:
    """`window` of a BlockConfig where all blocks have one, whatever else a config.json says of windows: of such
    families transformers reads `sliding_window` alone. default: where that is left out."""
    window = config.get("sliding_window", default)
    return {} if window is None or window >= context else {"window": int(window)}


def read_windows(config: dict, depth: int, context: int, first: int = 0) -> dict:
    """`window` and `others` of a BlockConfig where blocks have one as `layer_types` says; where that is left out, from
    the block `first` on."""
    window = read_window(config, context, 4096)
    if not window:
        return {}
    kinds = config.get("layer_types") or [SLIDING if i >= first else FULL for i in range(depth)]
    full = full_blocks(kinds, depth)
    return {} if len(full) == depth else window | {"others": OtherBlocks(full)}


def full_blocks(kinds: list[str], depth: int) -> tuple[int, ...]:
    """Those whose attention sees all tokens, by a config.json's `layer_types`."""
    if len(kinds) != depth or not {*kinds} <= {SLIDING, FULL}:
        fix = f"must be {depth} times {SLIDING} or {FULL}"
        raise UserError("config.json: layer_types", sorted({*map(str, kinds)}), fix)
    return tuple(i for i, kind in enumerate(kinds) if kind == FULL)


def write_windows(model: ModelConfig) -> dict:
    """`sliding_window`, and `layer_types` where blocks differ."""
    if not model.block.others.places:
        return {"sliding_window": model.block.window}
    refuse("block.others.rotary", model.block.others.rotary, ("same",), "rotary is the same in all blocks")
    refuse("block.others.window", model.block.others.window, (None,), "blocks have the one window or see all tokens")
    return {"sliding_window": model.block.window, "layer_types": layer_types(model)}


def layer_types(model: ModelConfig) -> list[str]:
    return [FULL if window is None else SLIDING for window in model.windows]


def refuse(field: str, value: object, allowed: tuple, why: str) -> None:
    """Raises Inexpressible unless the value is one of those allowed."""
    if value not in allowed:
        raise Inexpressible(field, value, why)
