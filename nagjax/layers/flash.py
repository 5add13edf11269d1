"""Attention on a GPU that writes no scores to memory: tokamax's Pallas-Triton kernel.

The kernel takes, for every query, the stretch of keys that it sees. For packed documents, windows and routed queries
these stretches follow from `Where` in one loop that XLA fuses. The forward pass has nothing as large as tokens times
tokens; the backward pass a mask, one byte for a query and a key, of one layer at a time.
Source: Dao 2023, arXiv:2307.08691. Numerics: softmax in float32. Needs the extra `nagjax[tokamax]`.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from nagjax.errors import UserError
from nagjax.layers.platform import head_axis
from nagjax.layers.where import Where, Window, causal_mask
from pallas_kernels.placement import current_placement


def seen_keys(queries: Where, keys: Where, window: Window = None) -> tuple[Int[Array, "B Tq"], Int[Array, "B Tq"]]:
    """The first key in the row that each query sees, and the one behind the last, where those between are all seen."""
    seen = causal_mask(queries, keys, window)[:, 0]
    place = jnp.arange(seen.shape[-1], dtype=jnp.int32)
    first = jnp.min(jnp.where(seen, place, seen.shape[-1]), axis=-1)
    return first, jnp.max(jnp.where(seen, place + 1, 0), axis=-1)


def flash(
    q: Float[Array, "B Tq H Dh"],
    k: Float[Array, "B Tk K Dh"],
    v: Float[Array, "B Tk K Dh"],
    q_where: Where,
    k_where: Where,
    window: Window,
) -> Float[Array, "B Tq H Dh"]:
    """`nagjax.layers.attend.attend` of whole sequences. Raises UserError where tokamax is not installed."""
    local = functools.partial(_local, _kernel())
    stretch = seen_keys(q_where, k_where, window)
    placement = current_placement()
    if placement is None:
        return local(q, k, v, *stretch)
    mesh, batch = placement.mesh, placement.rows[0]
    rows = P(batch, None, head_axis(mesh, k.shape[2]), None)
    specs = (rows, rows, rows, P(batch, None), P(batch, None))
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows, check_vma=False)(q, k, v, *stretch)


def _local(kernel, q, k, v, first, end):
    attention, mask = kernel
    return attention(q, k, v, mask=mask(k_start=first[:, None], k_end=end[:, None]))


@functools.cache
def _kernel():
    try:
        from tokamax._src.ops.attention.base import Mask  # stretches of keys are not in its public function
        from tokamax.ops.gpu import PallasTritonFlashAttention
    except ImportError as error:
        fix = f"needs the package tokamax (no {error.name}): pip install 'nagjax[tokamax]', or choose auto or xla"
        raise UserError("attention", "tokamax", fix) from None
    unchecked = {"bypass_device_check": True}  # it knows this machine's device, not the one that is compiled for
    forward = PallasTritonFlashAttention(**unchecked)
    return dataclasses.replace(forward, vjp=dataclasses.replace(forward.vjp, **unchecked)), Mask
