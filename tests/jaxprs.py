"""Looking into what JAX has traced."""

from collections.abc import Iterator

from jax.extend.core import jaxprs_in_params


def equations(jaxpr) -> Iterator:
    """Those of a program and of all programs in it, each once however often it runs."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jaxprs_in_params(equation.params):
            yield from equations(inner)
