"""nagjax: train and understand very deep Transformers, with the residual stream as the subject."""

__version__ = "0.1.0"


def load(path, *, devices=None):
    """The model in a folder: a run, an exported bundle, or a transformers model; see `nagjax.interop.load.load`."""
    from nagjax.interop.load import load as load_model

    return load_model(path, devices=devices)


_NOTEBOOK = {"fit", "log", "table", "plot", "depth_map", "dial"}
_ELSEWHERE = {
    "complete": "nagjax.generate.sample",
    "find_scheme": "nagjax.residual",
    "schemes": "nagjax.residual",
    "register": "nagjax.residual",
    "ModConfig": "nagjax.mod",
    "probe": "nagjax.measure.probe",
    "diagnose": "nagjax.report.diagnosis",
}


def __getattr__(name: str):
    """The calls of notebooks, imported when they are first asked for: `import nagjax` alone does not import jax."""
    module = "nagjax.notebook" if name in _NOTEBOOK else _ELSEWHERE.get(name)
    if module is None:
        raise AttributeError(f"nagjax has no {name!r}; it has {', '.join(_calls())}, and its packages")
    import importlib

    return getattr(importlib.import_module(module), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_calls()})


def _calls() -> list[str]:
    return sorted({"load", *_NOTEBOOK, *_ELSEWHERE})
