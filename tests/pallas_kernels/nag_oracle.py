"""The NAG update written again from the paper, in float64, with vector norms and projections."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.shapes import tolerance


def update(r, s, u, t):
    d = r.shape[-1]
    u = u - u.sum(-1, keepdims=True) / d
    inner = jnp.einsum("nd,nd->n", u, r)[:, None]
    perpendicular = u - inner / d * r
    length = jnp.sqrt(jnp.einsum("nd,nd->n", perpendicular, perpendicular) + d * 1e-12)[:, None]
    unit = np.sqrt(d) * perpendicular / length
    nothing = length**2 <= 2 * d * 1e-12  # no direction: it is differentiated as if it were not normalised
    unit = jnp.where(nothing, jax.lax.stop_gradient(unit - perpendicular) + perpendicular, unit)
    y = r + t[:, None] * unit
    size = jnp.sqrt(jnp.einsum("nd,nd->n", y, y) + d * 1e-12)[:, None]
    turned = np.sqrt(d) * y / size
    nothing = size**2 <= 2 * d * 1e-12
    turned = jnp.where(nothing, jax.lax.stop_gradient(turned - y) + y, turned)
    return turned, s - jnp.log(jnp.cos(jnp.arctan(t)))


def inputs(n, d, dtype, seed=0):
    """Unit-RMS directions, updates of mixed size, and a cotangent pair, rounded to dtype."""
    normal = np.random.default_rng(seed).standard_normal
    r = normal((n, d))
    r = r / np.sqrt(np.mean(r * r, -1, keepdims=True))
    u = np.exp(2 * normal((n, 1))) * (normal((n, d)) + 0.3)
    rows, scalars = (lambda x: jnp.asarray(x, dtype)), (lambda x: jnp.asarray(x, jnp.float32))
    primals = rows(r), scalars(normal(n)), rows(u), scalars(0.6 * normal(n))
    return primals, (rows(normal((n, d))), scalars(normal(n)))


@functools.partial(jax.jit, static_argnums=0)
def with_gradients(fn, primals, cotangents):
    """Outputs, then gradients, as one flat list."""
    outputs, pull = jax.vjp(fn, *primals)
    return [*outputs, *pull(cotangents)]


def exact(fn, primals, cotangents):
    """`with_gradients` in float64, on the same rounded inputs."""
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (primals, cotangents))
        return [np.asarray(x) for x in with_gradients(fn, *wide)]


def nbytes(tree):
    return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree))


def assert_close(names, got, want, width, sums=4):
    """Every result within its tolerance; errors are measured in units of the row's (or vector's) RMS."""
    for name, value, truth in zip(names, got, want, strict=True):
        allowed = tolerance(value.dtype, width, sums)
        value = np.asarray(value, np.float64)
        assert value.shape == truth.shape and np.all(np.isfinite(value)), name
        size = np.sqrt(np.mean(truth**2, axis=-1, keepdims=True)) + 1e-30
        np.testing.assert_allclose(value / size, truth / size, err_msg=name, **allowed)
