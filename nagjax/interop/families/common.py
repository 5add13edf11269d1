"""What the families' config.json files have in common."""

from nagjax.errors import UserError
from nagjax.interop.families import Inexpressible
from nagjax.layers.config import RopeConfig
from nagjax.model.config import ModelConfig


def need(config: dict, *names: str) -> list:
    """Values that a config.json must have. Raises UserError naming the first it does not."""
    for name in names:
        if config.get(name) is None:
            raise UserError(f"config.json: {name}", None, "is missing: bring the model's own config.json back")
    return [config[name] for name in names]


def only(config: dict, name: str, allowed: tuple, default: object) -> object:
    """A setting of which nagjax knows some values. Raises UserError for others."""
    value = config.get(name, default)
    if value not in allowed:
        raise UserError(f"config.json: {name}", value, f"cannot be imported; known: {', '.join(map(repr, allowed))}")
    return value


def read_rope(config: dict, base: float = 10_000.0) -> tuple[float, RopeConfig, float | None]:
    """Base, scaling, and share of the rotated features (None where it is not said), of old and new files."""
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    base = float(given.get("rope_theta", config.get("rope_theta", base)))
    kind = given.get("rope_type", given.get("type", "default"))
    share = given.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if kind == "default":
        return base, RopeConfig(), share
    if kind == "linear":
        return base, RopeConfig("linear", factor=float(given["factor"])), share
    if kind != "llama3":
        raise UserError("config.json: rope_type", kind, "cannot be imported; known: default, linear, llama3")
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (float(value) for value in need(given, *names))
    original = given.get("original_max_position_embeddings") or config["max_position_embeddings"]
    return base, RopeConfig("llama3", factor, low, high, int(original)), share


def write_rope(model: ModelConfig) -> dict:
    """The fields of a config.json that `read_rope`, and any version of transformers, reads."""
    rope = model.block.rope
    scaling = {
        "none": None,
        "linear": {"rope_type": "linear", "factor": rope.factor},
        "llama3": {
            "rope_type": "llama3",
            "factor": rope.factor,
            "low_freq_factor": rope.low,
            "high_freq_factor": rope.high,
            "original_max_position_embeddings": rope.original,
        },
    }[rope.scaling]
    return {"rope_theta": model.rope_base} | ({"rope_scaling": scaling} if scaling else {})


def read_window(
    config: dict, depth: int, context: int, default: int | None = 4096, always: bool = False, first: int = 28
) -> int | None:
    """The sliding window, where all blocks have one that is narrower than the context. default: where a config.json
    leaves it out. always: it is used unless that is denied. first: the first block that has it."""
    window = config.get("sliding_window", default)
    if not config.get("use_sliding_window", always) or window is None or window >= context:
        return None
    first = config.get("max_window_layers", first)
    kinds = config.get("layer_types") or ["sliding_attention" if i >= first else "full_attention" for i in range(depth)]
    if set(kinds) == {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"}:
        fix = f"blocks with and without a window cannot be imported; a --context of at most {window} needs none"
        raise UserError("config.json: layer_types", sorted(set(kinds)), fix)
    return int(window)


def refuse(field: str, value: object, allowed: tuple, why: str) -> None:
    """Raises Inexpressible unless the value is one of those allowed."""
    if value not in allowed:
        raise Inexpressible(field, value, why)
