"""nagjax: train and understand very deep Transformers, with the residual stream as the subject.

`nagjax.NAG`, `Review`, `LNS`, `Plain`, ... are Flax modules, one for each residual scheme, for a model of your own
(`nagjax.residual.module`; as Linen modules in `nagjax.linen`), with `optimizer`, `start_factors` and `MixtureOfDepths`.
`Transformer` and `ModelConfig` are nagjax's model; `fit` trains one, `load` opens one.
"""

__version__ = "0.1.0"


_MODULES = {"data", "generate", "interop", "layers", "linen", "measure", "mod", "model", "plan", "report"}
_MODULES |= {"residual", "runs", "train"}
_CALLS = {
    "load": "nagjax.interop.load",
    "answer": "nagjax.generate.chat",
    "complete": "nagjax.generate.sample",
    "Transformer": "nagjax.model.transformer",
    "ModelConfig": "nagjax.model.config",
    "Residual": "nagjax.residual.module",
    "start_factors": "nagjax.residual.module",
    "MixtureOfDepths": "nagjax.mod.module",
    "optimizer": "nagjax.train.own_model",
    "decays": "nagjax.train.own_model",
    "constrain": "nagjax.train.own_model",
    "find_scheme": "nagjax.residual.registry",
    "schemes": "nagjax.residual.registry",
    "register": "nagjax.residual.registry",
    "ModConfig": "nagjax.mod",
    "probe": "nagjax.measure.probe",
    "diagnose": "nagjax.report.diagnosis",
}
_CALLS |= dict.fromkeys(("fit", "log", "table", "plot", "depth_map", "skip_curve"), "nagjax.notebook")


def __getattr__(name: str):
    """Gives the calls, the module of every scheme (`nagjax.NAG`) and the packages. Each is imported at its first use,
    so that `import nagjax` alone does not import jax."""
    import importlib.util

    if name in _CALLS:
        return getattr(importlib.import_module(_CALLS[name]), name)
    if name.startswith("_"):
        raise AttributeError(f"nagjax has no {name!r}")
    if importlib.util.find_spec(f"nagjax.{name}"):
        return importlib.import_module(f"nagjax.{name}")
    schemes = _schemes()
    if name not in schemes:
        raise AttributeError(f"nagjax has no {name!r}; it has {', '.join(_calls())}, and its packages")
    return schemes[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *_calls()})


def _schemes() -> dict:
    from nagjax.residual.module import modules

    return modules()


def _calls() -> list[str]:
    """All public names. The schemes' names are read from the stub file, so that listing them does not import jax
    either."""
    import re
    from pathlib import Path

    stub = Path(__file__).with_name("__init__.pyi").read_text(encoding="utf-8")
    return sorted({*_MODULES, *_CALLS, *re.findall(r"^class (\w+)\(", stub, re.MULTILINE)})
