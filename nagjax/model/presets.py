"""Named sizes from 1M to 7B parameters: each is a depth and a width, from which all other sizes follow."""

import dataclasses

from nagjax.errors import UserError


@dataclasses.dataclass(frozen=True)
class Preset:
    """Depth and width of a deep, narrow model, and the context to train it with."""

    depth: int
    width: int
    context: int

    def arguments(self) -> list[str]:
        """The preset as command-line options, which come before the user's own."""
        fields = dataclasses.asdict(self).items()
        return [part for name, value in fields for part in (f"--{name}", str(value))]


# About 12 * depth * width^2 parameters in the blocks, without those of the scheme.
PRESETS = {
    "1M": Preset(depth=24, width=64, context=128),
    "4M": Preset(depth=24, width=128, context=256),
    "20M": Preset(depth=24, width=256, context=512),
    "60M": Preset(depth=32, width=384, context=1024),
    "150M": Preset(depth=48, width=512, context=1024),
    "350M": Preset(depth=64, width=640, context=2048),
    "1B": Preset(depth=80, width=1024, context=2048),
    "3B": Preset(depth=112, width=1536, context=4096),
    "7B": Preset(depth=136, width=2048, context=4096),
}


def find_preset(name: str) -> Preset:
    """The preset of this name, in upper or lower case. Raises UserError with the known names if there is none."""
    by_name = {known.lower(): preset for known, preset in PRESETS.items()}
    if name.lower() not in by_name:
        raise UserError("preset", name, f"known presets: {', '.join(PRESETS)}; or give --depth and --width")
    return by_name[name.lower()]
