"""Functions for the fields that the families' config.json files have in common."""

import math

from nagjax.errors import UserError
from nagjax.interop.families import Inexpressible
from nagjax.layers.config import OtherBlocks, RopeConfig
from nagjax.model.config import ModelConfig
from nagjax.ranges import check_value, field_hints


def need(config: dict, *names: str) -> list:
    """The values of fields that a config.json must have. Raises UserError naming the first that is missing."""
    for name in names:
        if config.get(name) is None:
            raise UserError(f"config.json: {name}", None, "is missing: bring the model's own config.json back")
    return [config[name] for name in names]


def read_depth(config: dict) -> int:
    """The number of blocks, checked here because some families make lists of it before a ModelConfig checks it. Raises
    UserError."""
    (depth,) = need(config, "num_hidden_layers")
    check_value("config.json: num_hidden_layers", depth, field_hints(ModelConfig)["depth"])
    return depth


def number(config: dict, name: str, default: float) -> float:
    """The value of a field as a float. Raises UserError, naming the field, for one that is no number."""
    value = config.get(name, default)
    check_value(f"config.json: {name}", value, float)
    return float(value)


def only(config: dict, name: str, allowed: tuple, default: object) -> object:
    """The value of a field of which nagjax supports only the `allowed` values. Raises UserError for others."""
    value = config.get(name, default)
    if value not in allowed:
        raise UserError(f"config.json: {name}", value, f"cannot be imported; known: {', '.join(map(repr, allowed))}")
    return value


def read_sizes(config: dict, context: int, *, tied: bool = False, kv_heads: int | None = None) -> dict:
    """The sizes of a ModelConfig, from the field names that most families use. The arguments are the defaults for a
    config.json without these fields; without `kv_heads` there are as many as heads."""
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
    """The number of positions in a table of learned ones, even if a shorter context was asked for."""
    return int(config.get(LONGEST) or config.get("max_position_embeddings") or default)


def own_head_width(sizes: dict, width: int | None) -> int | None:
    """The width of a head if a config.json sets one; None if the heads share the model's width, as they usually do."""
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
    """Rotary base, scaling, and the share of the features that are rotated (None if the file does not say), from files
    of old and new versions."""
    given = rope_settings(config)
    base = number(given if "rope_theta" in given else config, "rope_theta", base)
    share = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    return base, read_scaling(given, context, config.get(LONGEST) or context), share


def rope_settings(config: dict) -> dict:
    """`rope_parameters`, or in older files `rope_scaling`, which transformers prefers if a file has both. Raises
    UserError if the two differ."""
    given, old = config.get("rope_parameters") or {}, config.get("rope_scaling") or {}
    for name, values in (("rope_parameters", given), ("rope_scaling", old)):
        if not isinstance(values, dict):
            raise UserError(f"config.json: {name}", values, "give an object, as transformers writes it")
    if given and any(given.get("rope_type" if name == "type" else name) != value for name, value in old.items()):
        raise UserError("config.json: rope_scaling", old, f"rope_parameters says otherwise ({given}): keep one of them")
    return given or old


def read_whole_rope(config: dict, context: int, base: float = 10_000.0) -> tuple[float, RopeConfig]:
    """Rotary base and scaling in families that rotate all features of a head. There transformers ignores a share of
    rotated features, or fails if frequencies are scaled. Raises UserError if the file sets a share."""
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
    """The scaling by the factors for contexts up to the original one; the factors for longer contexts would change the
    result in shorter ones, too."""
    if context > original:
        fix = f"beyond {original:,} tokens all frequencies change, which no cache supports: give --context {original}"
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
    """YaRN's factor on queries and on keys."""
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    grown = lambda weight: 0.1 * weight * math.log(factor) + 1.0 if factor > 1.0 else 1.0  # noqa: E731
    if given.get("mscale") and given.get("mscale_all_dim"):
        return grown(given["mscale"]) / grown(given["mscale_all_dim"])
    return grown(1.0)


def write_rope(model: ModelConfig) -> dict:
    """The rotary fields of a config.json, in the form that `read_rope` and all versions of transformers read."""
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


LONGEST = "longest"  # a key added to a config.json's fields: its context, before a shorter one was asked for
SLIDING, FULL = "sliding_attention", "full_attention"


def read_window(config: dict, context: int, default: int | None = None) -> dict:
    """The `window` of a BlockConfig in families whose blocks all have the same. Of a config.json's fields about
    windows, transformers reads only `sliding_window` for these families. `default` applies if it is missing."""
    window = config.get("sliding_window", default)
    return {} if window is None or window >= context else {"window": int(window)}


def read_windows(config: dict, depth: int, context: int, first: int = 0) -> dict:
    """`window` and `others` of a BlockConfig in families where `layer_types` says which blocks have a window; if it is
    missing, the blocks from `first` on have one."""
    window = read_window(config, context, 4096)
    if not window:
        return {}
    kinds = config.get("layer_types") or [SLIDING if i >= first else FULL for i in range(depth)]
    full = full_blocks(kinds, depth)
    return {} if len(full) == depth else window | {"others": OtherBlocks(full)}


def full_blocks(kinds: list[str], depth: int) -> tuple[int, ...]:
    """The blocks whose attention sees all tokens, from a config.json's `layer_types`."""
    if len(kinds) != depth or not {*kinds} <= {SLIDING, FULL}:
        fix = f"must be {depth} times {SLIDING} or {FULL}"
        raise UserError("config.json: layer_types", sorted({*map(str, kinds)}), fix)
    return tuple(i for i, kind in enumerate(kinds) if kind == FULL)


def write_windows(model: ModelConfig) -> dict:
    """The fields `sliding_window` and, if blocks differ, `layer_types`."""
    if not model.block.others.places:
        return {"sliding_window": model.block.window}
    refuse("block.others.rotary", model.block.others.rotary, ("same",), "rotary is the same in all blocks")
    refuse("block.others.window", model.block.others.window, (None,), "blocks have the one window or see all tokens")
    return {"sliding_window": model.block.window, "layer_types": layer_types(model)}


def layer_types(model: ModelConfig) -> list[str]:
    return [FULL if window is None else SLIDING for window in model.windows]


def refuse(field: str, value: object, allowed: tuple, why: str) -> None:
    """Raises Inexpressible unless the value is one of `allowed`."""
    if value not in allowed:
        raise Inexpressible(field, value, why)
