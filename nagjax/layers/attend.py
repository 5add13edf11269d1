"""Softmax attention over given queries, keys and values, with the best implementation for the device."""

import functools
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from nagjax.errors import UserError
from nagjax.layers.flash import flash
from nagjax.layers.platform import head_axis
from nagjax.layers.platform import platform as current_platform
from nagjax.layers.softcap import softcap
from nagjax.layers.where import Window, seen_mask
from pallas_kernels.placement import Placement, current_placement

SPLASH_BLOCK = 128  # splash attention works on whole blocks of the sequence


def attend(
    q: Float[Array, "B Tq H Dh"],
    k: Float[Array, "B Tk K Dh"],
    v: Float[Array, "B Tk K Dh"],
    q_where,
    k_where,
    implementation: str = "auto",
    window: Window = None,
    cap: float | None = None,
    causal: bool = True,
) -> Float[Array, "B Tq H Dh"]:
    """Attention within documents, causal or not, scaled by 1/sqrt(Dh), H a multiple of K; softmax in float32.

    `q_where` and `k_where` are `Where`s. implementation: "xla"; "cudnn" (GPU, bfloat16); "tokamax" (GPU, without
    scores in memory, `nagjax.layers.flash`); "splash" (TPU, causal, sequences in whole blocks of 128 tokens, as many
    queries as keys, no window); "auto" takes the fastest that applies. window: the number of tokens that a causal query
    sees, counting back from its own. cap: limits the logits (`softcap`), xla alone.

    If the tokens are split over a mesh axis, keys and values are gathered here and queries stay where they are.

    Raises UserError if a named implementation cannot take the input.
    """
    placement = current_placement()
    split = placement if _parts(placement) > 1 else None
    if split:  # otherwise every device computes all values, from gathered activations
        q, k, v = (_with_tokens(x, split, split.rows[1]) for x in (q, k, v))
    if implementation == "auto":
        implementation = "xla" if cap is not None else _best(q, k, splash=window is None and causal)
    if cap is not None and implementation != "xla":
        raise UserError("attention", implementation, f"does not support block.softcap = {cap}: choose auto or xla")
    if implementation == "tokamax":
        return flash(q, k, v, q_where, k_where, window, causal)
    if implementation == "splash":
        if window is not None or not causal:
            missing = "block.window" if causal else "bidirectional attention"
            raise UserError("attention", "splash", f"does not support {missing}: choose auto or xla")
        return _splash(q, k, v, q_where, k_where)
    mask = seen_mask(q_where, k_where, window, causal)
    if split:
        k, v = (_with_tokens(x, split, None) for x in (k, v))
    if cap is not None:
        return _capped(q, k, v, mask, cap)
    return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=cast(Any, implementation))


def _capped(q, k, v, mask: Bool[Array, "B 1 Tq Tk"], cap: float) -> Float[Array, "B Tq H Dh"]:
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(mask[:, :, None], softcap(scores, cap), jnp.finfo(jnp.float32).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", shares, v).reshape(q.shape)


def _parts(placement: Placement | None) -> int:
    """How many parts the tokens of a sequence are split into."""
    if placement is None or len(placement.rows) < 2:
        return 1
    axes = placement.rows[1]
    return math.prod(placement.mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))


def _with_tokens(x: Float[Array, "B T H Dh"], placement: Placement, axes) -> Float[Array, "B T H Dh"]:
    """x with its tokens split over these mesh axes (None: not split), and otherwise as it is."""
    free = P.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(x, NamedSharding(placement.mesh, P(free, axes, free, free)))


def _best(q, k, *, splash: bool = True) -> str:
    platform, parts = current_platform(), _parts(current_placement())
    if platform == "tpu" and splash and q.shape[1] == k.shape[1] and q.shape[1] % (parts * SPLASH_BLOCK) == 0:
        return "splash"
    return "cudnn" if platform == "gpu" and parts == 1 and q.dtype.itemsize == 2 and q.shape[-1] % 8 == 0 else "xla"


def _splash(q, k, v, q_where, k_where):
    placement = current_placement()
    tokens, parts = q.shape[1], _parts(placement)
    if tokens != k.shape[1] or tokens % (parts * SPLASH_BLOCK):
        raise UserError(
            "attention",
            "splash",
            f"needs as many queries as keys, in whole blocks of {SPLASH_BLOCK}, "
            f"not {tokens} and {k.shape[1]} in {parts} parts: choose context accordingly, or attention=xla",
        )
    # Causality by slot and segment equals causality by position: documents are packed in order.
    local, ids = functools.partial(_splash_shard, scale=q.shape[-1] ** -0.5), q_where.segments
    if placement is None:
        return local(_splash_kernel(tokens, q.shape[2], 1), q, k, v, ids, ids)
    mesh, split = placement.mesh, placement.rows[1] if parts > 1 else None
    batch, heads = placement.rows[0], head_axis(mesh, k.shape[2])
    kernel = _splash_kernel(tokens, q.shape[2] // (mesh.shape[heads] if heads else 1), parts)
    rows, whole = P(batch, split, heads, None), P(batch, None, heads, None)
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(
            kernel.manual_sharding_spec(NamedSharding(mesh, P(None, split))),
            *(rows, whole, whole),
            *(P(batch, split), P(batch, None)),
        ),
        out_specs=rows,
        check_vma=False,
    )
    return mapped(kernel, q, k, v, ids, ids)


def _splash_kernel(tokens: int, heads: int, parts: int):
    """The kernel for this many heads; with several parts, its mask is to be split among as many devices."""
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel,
        splash_attention_mask,
    )

    block = max(b for b in (128, 256, 512) if tokens // parts % b == 0)
    mask = splash_attention_mask.MultiHeadMask([splash_attention_mask.CausalMask((tokens, tokens))] * heads)
    names = ("block_q", "block_kv", "block_kv_compute", "block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute")
    blocks: dict[str, Any] = dict.fromkeys((*names, "block_q_dq", "block_kv_dq"), block)
    sizes = splash_attention_kernel.BlockSizes(**blocks)
    return splash_attention_kernel.make_splash_mha(mask, head_shards=1, q_seq_shards=parts, block_sizes=sizes)


def _splash_shard(kernel, q, k, v, q_segments, k_segments, *, scale: float):
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    def one(q, k, v, q_segments, k_segments):
        ids = splash_attention_kernel.SegmentIds(q_segments, k_segments)
        heads_first = (x.swapaxes(0, 1) for x in (q * scale, k, v))
        return kernel(*heads_first, segment_ids=ids).swapaxes(0, 1)

    return jax.vmap(one)(q, k, v, q_segments, k_segments).astype(q.dtype)
