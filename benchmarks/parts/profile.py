"""Part `profile`: the time of a training step by part of the model, under the names that the model gives its parts."""

import functools
from collections.abc import Iterator

from benchmarks.parts.rows import Case, Options
from benchmarks.parts.steps import Size, blueprint_of, random_batch, sizes
from nagjax.measure.profile import trace_steps

SCHEMES = ("nag", "plain", "review", "lns")  # each is compiled anew: kernels are not launched as graphs


def cases(options: Options) -> Iterator[Case]:
    for size in sizes(options.rehearsal)[:1]:
        for scheme in SCHEMES[:1] if options.rehearsal else SCHEMES:
            name = {"size": size.name, "scheme": scheme}
            yield Case(name, functools.partial(measure, size, scheme, options))


def measure(size: Size, scheme: str, options: Options) -> dict:
    """Milliseconds per step by part of the model, with rematerialised blocks."""
    blueprint = blueprint_of(size, scheme, remat="none" if options.rehearsal else "block")
    found = trace_steps(blueprint, random_batch(size), options.scratch / "trace" / scheme, 3)
    return found | {"attention": blueprint.config.model.attention}
