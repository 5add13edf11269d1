"""Writes the stubs that tell editors and type checkers about the modules made from schemes.

python -m nagjax.residual.stubs        # writes nagjax/__init__.pyi and nagjax/linen.pyi
"""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any, get_type_hints

from nagjax.residual.protocol import Scheme
from nagjax.residual.registry import schemes

NAGJAX = Path(__file__).parents[1]

DOOR = """\
# Written by python -m nagjax.residual.stubs
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
from nagjax.notebook import dial as dial
from nagjax.notebook import fit as fit
from nagjax.notebook import log as log
from nagjax.notebook import plot as plot
from nagjax.notebook import table as table
from nagjax.report.diagnosis import diagnose as diagnose
from nagjax.residual.module import Residual as Residual
from nagjax.residual.module import start_factors as start_factors
from nagjax.residual.registry import find_scheme as find_scheme
from nagjax.residual.registry import register as register
from nagjax.residual.registry import schemes as schemes
{imports}
from nagjax.train.own_model import constrain as constrain
from nagjax.train.own_model import decays as decays
from nagjax.train.own_model import optimizer as optimizer

__version__: str
"""

LINEN = """\
# Written by python -m nagjax.residual.stubs
from nagjax.mod.linen import MixtureOfDepths as MixtureOfDepths
from nagjax.residual.linen import LinenResidual as LinenResidual
"""


def stubs() -> dict[Path, str]:
    """Each stub file and its content."""
    known = sorted(schemes().values(), key=lambda scheme: scheme.name)
    known = [scheme for scheme in known if scheme.__module__.startswith("nagjax.")]
    imports = "\n".join(f"from {s.__module__} import {s.__name__} as _{s.__name__}" for s in known)
    door = DOOR.format(imports=imports) + "".join(map(_nnx_class, known))
    linen = "\n" + "".join(f"class {s.__name__}(LinenResidual): ...\n" for s in known)
    return {NAGJAX / "__init__.pyi": door, NAGJAX / "linen.pyi": LINEN + linen}


def _nnx_class(scheme: type[Scheme]) -> str:
    doc = (inspect.getdoc(scheme) or "").split("\n\n")[0].replace("\n", "\n    ")
    types = get_type_hints(scheme)  # without the ranges that the command line checks
    fields = [f"        {field.name}: {_spelled(types[field.name])} = ...,\n" for field in dataclasses.fields(scheme)]
    return f"""
class {scheme.__name__}(Residual):
    \"\"\"
    {doc}
    \"\"\"

    Scheme: ClassVar[type[_{scheme.__name__}]]

    def __init__(
        self,
        width: int,
        sublayers: int,
        *,
        rngs: nnx.Rngs,
        embedding_std: float | None = ...,
{"".join(fields)}    ) -> None: ...
"""


def _spelled(annotation: Any) -> str:
    return re.sub(r"Optional\[(.*)\]", r"\1 | None", inspect.formatannotation(annotation))


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text, encoding="utf-8")
