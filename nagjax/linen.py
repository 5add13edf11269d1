"""The residual schemes as Linen modules: `nagjax.linen.NAG`, `nagjax.linen.Review`, ..., one for each scheme.

    class Mixer(nn.Module):
        @nn.compact
        def __call__(self, x, progress):
            branches = [nn.Dense(512) for _ in range(24)]
            return nagjax.linen.NAG(width=512, sublayers=24)(x, branches, progress=progress)

Each one runs the nnx module of the same name (`nagjax.NAG`) on Linen's parameters: "gate", "entry" and "ends" in
"params". They are boxed with the names of their axes, which `nn.get_partition_spec` reads; `nn.unbox` removes the
boxes. A scheme's options are passed as `options`: `NAG(width=512, sublayers=24, options={"directions": 16})`.
`MixtureOfDepths` routes one of these modules.
"""

import functools

from nagjax.mod.linen import MixtureOfDepths
from nagjax.residual import Scheme
from nagjax.residual.linen import LinenResidual
from nagjax.residual.module import module_of, modules

__all__ = ["LinenResidual", "MixtureOfDepths"]


@functools.cache
def _module_of(scheme: type[Scheme]) -> type[LinenResidual]:
    doc = f"{module_of(scheme).__doc__}\n\nA Linen module; options of the scheme: `options`."
    return type(scheme.__name__, (LinenResidual,), {"__doc__": doc, "__module__": __name__, "Scheme": scheme})


def __getattr__(name: str) -> type[LinenResidual]:
    known = {} if name.startswith("_") else modules()
    if name not in known:
        raise AttributeError(f"nagjax.linen has no {name!r}; it has {', '.join(modules())}")
    return _module_of(known[name].Scheme)


def __dir__() -> list[str]:
    return sorted({*globals(), *modules()})
