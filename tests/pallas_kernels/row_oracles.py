"""add_rms_norm and review_update written again from their equations, and how results are held to them."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.shapes import tolerance


def stored(x, dtype):
    """x rounded to `dtype` and back; its gradient passes as if it were not rounded."""
    return x + jax.lax.stop_gradient(x.astype(dtype).astype(x.dtype) - x)


def norm(x, epsilon):
    """Root mean square of every row, from its Euclidean length."""
    return jnp.sqrt(jnp.einsum("nd,nd->n", x, x)[:, None] / x.shape[-1] + epsilon)


def add_rms_norm(stream, update, gain, scale, *, dtype, epsilon=1e-6):
    total = stored(stream + update, dtype)
    return total, scale * gain * total / norm(total, epsilon)


def review_update(stream, update, state, proposal, bias, gain, scale, *, dtype, epsilon=1e-5):
    logit = state / norm(stream, epsilon) + proposal / norm(update, epsilon) + bias
    total = stored(stream + update / (1 + jnp.exp(-logit)), dtype)
    return total, scale * gain * total / norm(total, epsilon)


def inputs(rows, vectors, n, width, dtype, seed=0):
    """Rows of mixed size rounded to dtype, float32 vectors, a scale; and a pair of cotangents."""
    keys = iter(jax.random.split(jax.random.key(seed), rows + vectors + 3))
    spread = jnp.exp(jax.random.normal(next(keys), (n, 1)))
    primals = [(spread * jax.random.normal(next(keys), (n, width))).astype(dtype) for _ in range(rows)]
    primals += [1 + 0.5 * jax.random.normal(next(keys), (width,)) for _ in range(vectors)]
    cotangents = [jax.random.normal(next(keys), (n, width)).astype(dtype) for _ in range(2)]
    return (*primals, jnp.float32(0.7)), tuple(cotangents)


def with_gradients(fn, primals, cotangents):
    """Outputs, then gradients."""
    outputs, pull = jax.vjp(fn, *primals)
    return [*outputs, *pull(cotangents)]


def compare(oracle, candidates, primals, cotangents):
    """Hold outputs and gradients of `{name: fn}` to the oracle in float64 on the same rounded inputs.

    Arrays of rows are compared after division by the largest true value of their row, sums over rows after
    division by the root of their number of terms: `tolerance` speaks of values of about one.
    """
    dtype, (n, width) = primals[0].dtype, primals[0].shape
    with jax.enable_x64(True):

        def run(primals, cotangents):
            wide = jax.tree.map(lambda x: x.astype(jnp.float64), (primals, cotangents))
            exact = with_gradients(lambda *a: oracle(*a, dtype=dtype), *wide)
            return exact, {k: with_gradients(f, primals, cotangents) for k, f in candidates.items()}

        exact, results = jax.device_get(jax.jit(run)(primals, cotangents))
    for name, values in results.items():
        for position, (got, want) in enumerate(zip(values, exact, strict=True)):
            label = f"{name}, result {position} of {n}x{width} {dtype}"
            of_rows = want.ndim == 2
            assert got.dtype == (dtype if of_rows else np.float32), label
            if of_rows:
                unit, limits = np.abs(want).max(-1, keepdims=True) + 1e-30, tolerance(dtype, width)
            else:
                unit, limits = np.sqrt(n * width / want.size), tolerance(np.float32, max(n, width))
                # Where the stored stream lies halfway between two numbers, float32 and float64 may differ.
                limits["atol"] += 4 * float(jnp.finfo(dtype).eps) / np.sqrt(n)
            if name == "reference" and position > 1:
                # Autodiff rounds the two gradients of the new stream to its dtype before it adds them.
                limits["atol"] += float(jnp.finfo(dtype).eps)
            got = np.asarray(got, np.float64)
            np.testing.assert_allclose(got / unit, want / unit, **limits, err_msg=label)
