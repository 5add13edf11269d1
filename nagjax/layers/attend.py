"""Softmax attention over given queries, keys and values, by the backend the machine has."""

import contextlib
import functools
from collections.abc import Iterator
from contextvars import ContextVar

import jax
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float

from nagjax.errors import UserError
from nagjax.layers.where import causal_mask
from pallas_kernels.placement import current_placement

SPLASH_BLOCK = 128  # splash attention works on whole blocks of the sequence
HEAD_AXIS = "tensor"  # mesh axis that heads are split over, where the mesh has it


def attend(
    q: Float[Array, "B Tq H Dh"],
    k: Float[Array, "B Tk K Dh"],
    v: Float[Array, "B Tk K Dh"],
    q_where,
    k_where,
    implementation: str = "auto",
    window: int | None = None,
) -> Float[Array, "B Tq H Dh"]:
    """Causal attention within documents, scaled by 1/sqrt(Dh), H a multiple of K; softmax in float32.

    `q_where` and `k_where` are `Where`s. implementation: "xla"; "cudnn" (GPU, bfloat16); "splash" (TPU, sequences of
    whole 128-token blocks, equal queries and keys, no window); "auto" takes the fastest of these that applies here.
    window: only so many tokens back, the own one included, are seen.

    Raises UserError where a forced implementation cannot take the input.
    """
    if implementation == "auto":
        implementation = _best(q, k, window)
    if implementation == "splash":
        if window is not None:
            raise UserError("attention", "splash", f"does not do block.window = {window}: choose auto or xla")
        return _splash(q, k, v, q_where, k_where)
    mask = causal_mask(q_where, k_where, window)
    return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=implementation)


_platform: ContextVar[str | None] = ContextVar("attention_platform", default=None)


@contextlib.contextmanager
def tracing_for(platform: str) -> Iterator[None]:
    """ "auto" traced inside takes what is best on that platform (tpu, gpu), whatever this machine is."""
    token = _platform.set(platform)
    try:
        yield
    finally:
        _platform.reset(token)


def _best(q, k, window: int | None = None) -> str:
    platform = _platform.get() or jax.default_backend()
    if platform == "tpu" and window is None and q.shape[1] == k.shape[1] and q.shape[1] % SPLASH_BLOCK == 0:
        return "splash"
    return "cudnn" if platform == "gpu" and q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 else "xla"


def _splash(q, k, v, q_where, k_where):
    tokens = q.shape[1]
    if tokens != k.shape[1] or tokens % SPLASH_BLOCK:
        raise UserError(
            "attention",
            "splash",
            f"needs as many queries as keys, in whole blocks of {SPLASH_BLOCK}, "
            f"not {tokens} and {k.shape[1]}: choose context accordingly, or attention=xla",
        )
    # Causality by slot and segment equals causality by position: documents are packed in order.
    local = functools.partial(_splash_shard, scale=q.shape[-1] ** -0.5)
    placement = current_placement()
    if placement is None:
        return local(q, k, v, q_where.segments)
    batch = placement.rows[0]
    sizes = placement.mesh.shape
    heads = HEAD_AXIS if k.shape[2] % sizes.get(HEAD_AXIS, k.shape[2] + 1) == 0 else None
    rows = P(batch, None, heads, None)
    mapped = jax.shard_map(
        local,
        mesh=placement.mesh,
        in_specs=(rows, rows, rows, P(batch, None)),
        out_specs=rows,
        check_vma=False,
    )
    return mapped(q, k, v, q_where.segments)


def _splash_shard(q, k, v, segments, *, scale: float):
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    tokens, heads = q.shape[1:3]
    block = max(b for b in (128, 256, 512) if tokens % b == 0)
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((tokens, tokens))] * heads)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    sizes = splash_attention_kernel.BlockSizes(**dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), block))
    kernel = splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=1, block_sizes=sizes)

    def one(q, k, v, segments):
        ids = splash_attention_kernel.SegmentIds(segments, segments)
        heads_first = (x.swapaxes(0, 1) for x in (q * scale, k, v))
        return kernel(*heads_first, segment_ids=ids).swapaxes(0, 1)

    return jax.vmap(one)(q, k, v, segments).astype(q.dtype)
