"""Writes the stubs that tell editors and type checkers the contents of `nagjax` and `nagjax.linen`: calls, packages,
and the modules made from schemes.

    python -m nagjax.stubs        # writes nagjax/__init__.pyi and nagjax/linen.pyi
"""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any, get_type_hints

import nagjax
from nagjax.residual.protocol import Scheme
from nagjax.residual.registry import own_schemes

NAGJAX = Path(__file__).parent

PACKAGE = """\
# Written by python -m nagjax.stubs
from typing import ClassVar

from flax import nnx

{imports}

__version__: str
"""

LINEN = """\
# Written by python -m nagjax.stubs
from nagjax.mod.linen import MixtureOfDepths as MixtureOfDepths
from nagjax.residual.linen import LinenResidual as LinenResidual
"""


def stubs() -> dict[Path, str]:
    """Each stub file and its content."""
    known = sorted(own_schemes().values(), key=lambda scheme: scheme.name)
    names = [("nagjax", name, name) for name in nagjax._MODULES]
    names += [(module, name, name) for name, module in nagjax._CALLS.items()]
    names += [(scheme.__module__, scheme.__name__, f"_{scheme.__name__}") for scheme in known]
    imports = "\n".join(f"from {module} import {name} as {own}" for module, name, own in sorted(names))
    package = PACKAGE.format(imports=imports) + "".join(map(_nnx_class, known))
    linen = "\n" + "".join(f"class {s.__name__}(LinenResidual): ...\n" for s in known)
    return {NAGJAX / "__init__.pyi": package, NAGJAX / "linen.pyi": LINEN + linen}


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
