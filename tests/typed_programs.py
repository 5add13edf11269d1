"""Traces training, evaluation, sampling and the modules with every annotation of nagjax checked while it runs.

A program of its own, which tests/test_annotations.py runs: the checks go in as a module is imported, and would meet bad
input before the errors that other tests ask for.
"""

import functools
import sys

from beartype import BeartypeConf, beartype
from jaxtyping import install_import_hook

checked = beartype(conf=BeartypeConf(is_pep484_tower=True))  # an int is a float, as for a static checker


RATES = {True: ({}, {"rate": (0.5,)}), False: ({"mlp_rate": (0.5,)},)}  # usual: dense and routed; else half of each


def programs(name: str, rates: dict):
    """What to trace for a scheme, by name: everything for the usual ones, the training step for the others."""
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from nagjax.generate.sample import generate
    from nagjax.layers.where import Where
    from nagjax.mod.config import ModConfig
    from nagjax.model.transformer import Transformer
    from nagjax.residual import find_scheme
    from nagjax.train.abstract_step import abstract_batch
    from nagjax.train.step import jit_eval_step, jit_train_step
    from tests import tiny
    from tests.own_models import branches_of, residual_of
    from tests.streams import USUAL

    scheme, mod = find_scheme(name)(), ModConfig(**rates)
    blueprint = tiny.blueprint(tiny.run_config(scheme, mod=mod))
    state, batch = blueprint.abstract(), abstract_batch(blueprint)
    yield "training", lambda: jit_train_step(blueprint).trace(state, batch)
    if name not in USUAL:
        return
    if name == "nag" and rates:
        all_by_one = ModConfig(**rates, capacity="adaptive", unit="block", kv="selected")
        adaptive = tiny.blueprint(tiny.run_config(scheme, mod=all_by_one))
        yield "adaptive training", lambda: jit_train_step(adaptive).trace(adaptive.abstract(), batch)
    token_bytes = jax.ShapeDtypeStruct((tiny.VOCAB,), jnp.float32)
    evaluation = (state.params, state.mod, state.step, batch, token_bytes)
    for causal in (False, True) if rates else (False,):
        yield "evaluation", functools.partial(jit_eval_step(blueprint, causal=causal).trace, *evaluation)
    model = Transformer(tiny.model_config(mod=mod), scheme, nnx.Rngs(0))
    cuts = jnp.zeros(model.config.sublayers) if rates else None
    yield "sampling", lambda: generate(model, [[1, 2], [3]], tokens=2, temperature=0.0, cuts=cuts)
    if not rates:
        where, x = Where.whole(2, 8), jnp.zeros((2, 8, model.config.width))
        residual = residual_of(model)
        yield "module", lambda: jax.eval_shape(lambda x: residual(x, branches_of(model, where), progress=1.0), x)


def main(names: list[str]) -> int:
    """Prints annotations that differ from what runs, and the number of programs traced."""
    from tests.streams import USUAL

    wrong = 0
    for name in names:
        for rates in RATES[name in USUAL]:
            for program, run in programs(name, rates):
                try:
                    run()
                except Exception as error:  # only the checker's error counts; any other must not look like success
                    wrong += 1
                    print(f"{program} of {name}, {rates}: {type(error).__name__}: {error}")
    return wrong


if __name__ == "__main__":
    with install_import_hook(["nagjax"], "typed_programs.checked"):
        sys.exit(min(main(sys.argv[1:]), 99))
