"""Softmax attention over given queries, keys and values, with the best implementation for the device."""

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Bool, Float

from nagjax.errors import UserError
from nagjax.layers import cudnn
from nagjax.layers.flash import flash, outgrows_cudnn
from nagjax.layers.platform import on_gpu
from nagjax.layers.platform import platform as current_platform
from nagjax.layers.softcap import softcap
from nagjax.layers.splash import refusal, splash
from nagjax.layers.where import Window, seen_mask
from pallas_kernels.launch.gpu import wrong_capability
from pallas_kernels.placement import Placement, current_placement


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
    gaps: bool = False,
) -> Float[Array, "B Tq H Dh"]:
    """Attention within documents, causal or not, scaled by 1/sqrt(Dh); softmax in float32. H is a multiple of K.

    `q_where` and `k_where` are `Where`s. If there are as many queries as keys, they are the same tokens in the same
    order; a key may have a segment of its own, which hides it from all queries. implementation: "xla"; "cudnn" (GPU,
    bfloat16); "tokamax" (GPU) and "splash" (TPU, causal), which both keep the scores out of memory
    (`nagjax.layers.flash`, `nagjax.layers.splash`); "auto" chooses what suits the device. window: the number of tokens
    that a causal query sees, counting back from its own. cap: limits the logits (`softcap`), with xla alone. gaps:
    whether some of the keys between the first and the last that a query sees may be hidden from it, which tokamax's
    kernels do not support.

    If the tokens are split over a mesh axis, keys and values are gathered here and queries stay where they are.

    Raises UserError if a named implementation cannot take the input.
    """
    placement = current_placement()
    split = placement if _parts(placement) > 1 else None
    if split:  # otherwise every device computes all values, from gathered activations
        q, k, v = (_with_tokens(x, split, split.rows[1]) for x in (q, k, v))
    if implementation == "auto":
        implementation = "xla" if cap is not None else _best(q, k, window, causal, gaps)
    if cap is not None and implementation != "xla":
        raise UserError("attention", implementation, f"does not support block.softcap = {cap}: choose auto or xla")
    if implementation == "cudnn" and (refused := cudnn.refusal(q.shape[-1], q.dtype)):
        raise UserError("attention", "cudnn", f"{refused}: choose auto or xla")
    if implementation == "tokamax":
        return flash(q, k, v, q_where, k_where, window, causal)
    if implementation == "splash":
        if refused := _splash_refusal(q, k, window, causal):
            raise UserError("attention", "splash", refused)
        return splash(q, k, v, q_where, k_where, window, _parts(placement))
    mask = seen_mask(q_where, k_where, window, causal)
    if split:
        k, v = (_with_tokens(x, split, None) for x in (k, v))
    if cap is not None:
        return _capped(q, k, v, mask, cap)
    if implementation == "cudnn":
        return cudnn.attention(q, k, v, mask)
    dtype = q.dtype
    if dtype == jnp.bfloat16 and on_gpu() and wrong_capability():  # JAX would ask for bfloat16 units, which it has not
        q, k, v = (x.astype(jnp.float32) for x in (q, k, v))
    return jax.nn.dot_product_attention(q, k, v, mask=mask, implementation=cast(Any, implementation)).astype(dtype)


def _capped(q, k, v, mask: Bool[Array, "B 1 Tq Tk"], cap: float) -> Float[Array, "B Tq H Dh"]:
    grouped = q.reshape(*q.shape[:2], k.shape[2], -1, q.shape[-1])
    scores = jnp.einsum("btkgd,bskd->bkgts", grouped, k, preferred_element_type=jnp.float32) * q.shape[-1] ** -0.5
    scores = jnp.where(mask[:, :, None], softcap(scores, cap), jnp.finfo(jnp.float32).min)
    shares = jax.nn.softmax(scores, axis=-1).astype(v.dtype)
    return jnp.einsum("bkgts,bskd->btkgd", shares, v).reshape(q.shape)


def _parts(placement: Placement | None, dimension: int = 1) -> int:
    """The number of parts into which the tokens of a sequence are split over devices; with dimension 0, the
    sequences."""
    return 1 if placement is None else placement.parts(dimension)


def _with_tokens(x: Float[Array, "B T H Dh"], placement: Placement, axes) -> Float[Array, "B T H Dh"]:
    """Splits the tokens of x over these mesh axes (None: does not split them) and leaves the other dimensions as they
    are."""
    free = P.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(x, NamedSharding(placement.mesh, P(free, axes, free, free)))


def _best(q, k, window: Window = None, causal: bool = True, gaps: bool = False) -> str:
    platform, placement = current_platform(), current_placement()
    if platform == "tpu" and _splash_refusal(q, k, window, causal) is None:
        return "splash"
    if platform != "gpu" or _parts(placement) > 1 or cudnn.refusal(q.shape[-1], q.dtype):
        return "xla"
    return "tokamax" if not gaps and outgrows_cudnn(q, k, q.shape[0] // _parts(placement, 0)) else "cudnn"


def _splash_refusal(q, k, window: Window, causal: bool) -> str | None:
    placement = current_placement()
    return refusal(q.shape[1], k.shape[1], q.shape[0] // _parts(placement, 0), _parts(placement), window, causal)
