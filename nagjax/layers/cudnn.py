"""cuDNN's attention on NVIDIA GPUs, through `jax.nn.dot_product_attention`, and the inputs that it supports."""

import re

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from nagjax.layers.platform import by_own_heads, on_gpu, platform
from pallas_kernels.dispatch import here
from pallas_kernels.launch.gpu import HOPPER_OR_NEWER, wrong_capability


def refusal(width: int, dtype: jnp.dtype) -> str | None:
    """Why cuDNN does not support heads of this width and dtype on the GPUs that the program is traced for; None if it
    does."""
    if not on_gpu() or dtype.itemsize != 2:
        return f"takes bfloat16 on a GPU, not {dtype} on a {platform()}"
    if here() == "rocm":
        return "is NVIDIA's, and these are AMD's GPUs"
    return wrong_capability() or width_refusal(width, wrong_capability((9, 0), HOPPER_OR_NEWER) is None)


def width_refusal(width: int, hopper_or_newer: bool) -> str | None:
    """Why cuDNN does not support heads of this width on a GPU of this generation; None if it does."""
    widest = 256 if hopper_or_newer else 128
    return f"takes multiples of 8 up to {widest} here, not heads of {width}" if width % 8 or width > widest else None


def is_hopper_or_newer(name: str) -> bool:
    """Whether a data-center GPU of this name is a Hopper or newer: NVIDIA H200, NVIDIA B200."""
    return re.search(HOPPER_OR_NEWER, name) is not None


def attention(
    q: Float[Array, "B Tq H Dh"],
    k: Float[Array, "B Tk K Dh"],
    v: Float[Array, "B Tk K Dh"],
    mask: Bool[Array, "B 1 Tq Tk"],
) -> Float[Array, "B Tq H Dh"]:
    """`jax.nn.dot_product_attention` by cuDNN. On a mesh each device computes its own sequences and heads. cuDNN's
    gradients need even numbers of queries and of keys: an odd number is padded by one that is never seen."""
    return by_own_heads(_local, q, k, v, mask)  # JAX's rule refuses queries that are split unlike keys


def _local(q, k, v, mask):
    queries, keys = q.shape[1], k.shape[1]
    if odd := (queries % 2, keys % 2) != (0, 0):
        more = (0, queries % 2), (0, keys % 2)
        q, k, v = (jnp.pad(x, ((0, 0), n, (0, 0), (0, 0))) for x, n in zip((q, k, v), (*more, more[1]), strict=True))
        mask = jnp.pad(mask, ((0, 0), (0, 0), *more))
    mixed = jax.nn.dot_product_attention(q, k, v, mask=mask, implementation="cudnn")
    return mixed[:, :queries] if odd else mixed
