"""Attention on a GPU that writes no scores to memory: tokamax's kernels.

They take, for every query, the stretch of keys that it sees. For packed documents, windows and routed queries these
stretches follow from `Where` in one loop that XLA fuses. On Hopper in 16 bits (Mosaic GPU) nothing is as large as
tokens times tokens. Elsewhere (Pallas-Triton) the forward pass has nothing of that size, and the backward pass a mask,
one byte for a query and a key, of one layer at a time.
Source: Dao 2023, arXiv:2307.08691. Numerics: softmax in float32. Needs the extra `tokamax`.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from nagjax.errors import UserError
from nagjax.layers.platform import by_own_heads, installed
from nagjax.layers.where import Where, Window, seen_mask
from pallas_kernels.launch.gpu import traced_gpus

SCOPE = "tokamax_attention"  # by which `nagjax plan` knows the kernels for Hopper
DENSE_LIMIT = 2**30  # bytes on a device of the mask for cuDNN's attention, a number for each query and key


def seen_keys(
    queries: Where, keys: Where, window: Window = None, causal: bool = True
) -> tuple[Int[Array, "B Tq"], Int[Array, "B Tq"]]:
    """The first key in the row that each query sees, and the one behind the last, where those between are all seen."""
    seen = seen_mask(queries, keys, window, causal)[:, 0]
    place = jnp.arange(seen.shape[-1], dtype=jnp.int32)
    first = jnp.min(jnp.where(seen, place, seen.shape[-1]), axis=-1)
    return first, jnp.max(jnp.where(seen, place + 1, 0), axis=-1)


def outgrows_cudnn(q: Float[Array, "B Tq H Dh"], k: Float[Array, "B Tk K Dh"], rows: int) -> bool:
    """Whether the mask of a device's rows would take more than `DENSE_LIMIT` where kernels that need none are there: on
    Hopper, with the package. Says once if only that is missing."""
    if not too_dense(rows, q.shape[1], k.shape[1], q.dtype.itemsize) or _hopper_tile(q) is None:
        return False
    return tokamax_installed()


def too_dense(rows: int, queries: int, keys: int, itemsize: int) -> bool:
    """Whether a number of so many bytes for each query and key takes more than `DENSE_LIMIT`."""
    return rows * queries * keys * itemsize > DENSE_LIMIT


def tokamax_installed() -> bool:
    """Whether it is; a warning if not."""
    return installed(
        ("tokamax", "jax_triton", "triton"),  # its module imports all of them
        f"attention: a mask of more than {DENSE_LIMIT >> 30} GiB is made for cuDNN; pip install -e '.[tokamax]' has "
        "kernels that need none",
    )


def flash(
    q: Float[Array, "B Tq H Dh"],
    k: Float[Array, "B Tk K Dh"],
    v: Float[Array, "B Tk K Dh"],
    q_where: Where,
    k_where: Where,
    window: Window,
    causal: bool = True,
) -> Float[Array, "B Tq H Dh"]:
    """`nagjax.layers.attend.attend` of whole sequences. Raises UserError where tokamax is not installed."""
    local = functools.partial(_local, _kernel(_hopper_tile(q)))
    return by_own_heads(local, q, k, v, *seen_keys(q_where, k_where, window, causal))


def _local(kernel, q, k, v, first, end):
    attention, mask = kernel
    with jax.named_scope(SCOPE):
        return attention(q, k, v, mask=mask(k_start=first[:, None], k_end=end[:, None]))


def _hopper_tile(q: Float[Array, "B T H Dh"]) -> int | None:
    """Keys that a Hopper kernel takes at once, as many as its shared memory has room for; None where the program is not
    for GPUs of that generation, or the dtype not one that the kernels take."""
    capability = lambda gpu: str(getattr(gpu, "compute_capability", ""))  # noqa: E731
    known = [capability(gpu).startswith("9.") or named_hopper(gpu.device_kind) for gpu in traced_gpus()]
    if not (known and all(known) and q.dtype in (jnp.bfloat16, jnp.float16)):
        return None
    return 128 if q.shape[-1] <= 128 else 64


def named_hopper(name: str) -> bool:
    """Whether a GPU of this name is of the Hopper generation: NVIDIA H200, GH200 480GB."""
    return re.search(r"\bG?H\d{2,3}\b", name) is not None


@functools.cache
def _kernel(hopper_tile: int | None):
    try:
        from tokamax._src.ops.attention.base import Mask  # stretches of keys are not in its public function
        from tokamax.ops import gpu
    except ImportError as error:
        fix = f"needs the package tokamax (no {error.name}): pip install -e '.[tokamax]', or choose auto or xla"
        raise UserError("attention", "tokamax", fix) from None
    if hopper_tile:
        return _for_hopper(hopper_tile), Mask
    unchecked = {"bypass_device_check": True}  # it knows this machine's device, not the one that is compiled for
    forward = gpu.PallasTritonFlashAttention(**unchecked)
    return dataclasses.replace(forward, vjp=dataclasses.replace(forward.vjp, **unchecked)), Mask


def _for_hopper(tile: int):
    """Its Mosaic GPU kernels. They ask which GPU this machine has: one without any, which only compiles, is told."""
    from tokamax._src import gpu_utils
    from tokamax._src.ops.attention.pallas_mosaic_gpu import ConfigSM90
    from tokamax.ops.gpu import PallasMosaicFlashAttention

    if jax.default_backend() != "gpu":
        gpu_utils._compute_capability = lambda device=None: 9.0
        gpu_utils.has_mosaic_gpu_support = lambda device=None: True
    # The same program wherever it is compiled: a persistent one needs the number of multiprocessors.
    config = ConfigSM90(block_q=64, block_kv=tile, num_stages=2, persistent=False)
    return PallasMosaicFlashAttention(config=config)
