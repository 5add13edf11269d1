"""Attention on a GPU by tokamax's kernels, which write no scores to memory.

For every query the kernels take the range of keys that it sees. For packed documents, windows and routed queries these
ranges follow from `Where` in one loop that XLA fuses. On Hopper in 16 bits (Mosaic GPU) no array is as large as tokens
times tokens. Elsewhere (Pallas-Triton) this holds for the forward pass; the backward pass has a mask of one byte per
query and key, for one layer at a time.

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

SCOPE = "tokamax_attention"  # the name by which `nagjax plan` finds the kernels for Hopper
DENSE_LIMIT = 2**30  # bytes per device of the mask for cuDNN, which has a number for each query and key


def seen_keys(
    queries: Where, keys: Where, window: Window = None, causal: bool = True
) -> tuple[Int[Array, "B Tq"], Int[Array, "B Tq"]]:
    """For each query, the row's index of the first key that it sees and the index after the last, if all keys between
    are seen."""
    seen = seen_mask(queries, keys, window, causal)[:, 0]
    place = jnp.arange(seen.shape[-1], dtype=jnp.int32)
    first = jnp.min(jnp.where(seen, place, seen.shape[-1]), axis=-1)
    return first, jnp.max(jnp.where(seen, place + 1, 0), axis=-1)


def outgrows_cudnn(q: Float[Array, "B Tq H Dh"], k: Float[Array, "B Tk K Dh"], rows: int) -> bool:
    """Whether the mask for cuDNN of a device's `rows` sequences would take more than `DENSE_LIMIT` bytes and tokamax's
    kernels, which need none, can replace it: on Hopper, with the package. Warns once if only the package is missing."""
    if not too_dense(rows, q.shape[1], k.shape[1], q.dtype.itemsize) or _hopper_tile(q) is None:
        return False
    return tokamax_installed()


def too_dense(rows: int, queries: int, keys: int, itemsize: int) -> bool:
    """Whether a number of `itemsize` bytes for each query and key takes more than `DENSE_LIMIT` bytes."""
    return rows * queries * keys * itemsize > DENSE_LIMIT


def tokamax_installed() -> bool:
    """Whether tokamax and its requirements are installed. Warns once if not."""
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
    """`nagjax.layers.attend.attend` for whole sequences by tokamax. Raises UserError where tokamax is not installed."""
    local = functools.partial(_local, _kernel(_hopper_tile(q)))
    return by_own_heads(local, q, k, v, *seen_keys(q_where, k_where, window, causal))


def _local(kernel, q, k, v, first, end):
    attention, mask = kernel
    with jax.named_scope(SCOPE):
        return attention(q, k, v, mask=mask(k_start=first[:, None], k_end=end[:, None]))


def _hopper_tile(q: Float[Array, "B T H Dh"]) -> int | None:
    """The number of keys in a tile of a Hopper kernel, the most that its shared memory holds; None if the program is
    for GPUs of another generation or the kernels do not support the dtype."""
    capability = lambda gpu: str(getattr(gpu, "compute_capability", ""))  # noqa: E731
    known = [capability(gpu).startswith("9.") or named_hopper(gpu.device_kind) for gpu in traced_gpus()]
    if not (known and all(known) and q.dtype in (jnp.bfloat16, jnp.float16)):
        return None
    return 128 if q.shape[-1] <= 128 else 64


def named_hopper(name: str) -> bool:
    """Whether this is the name of a GPU of the Hopper generation: NVIDIA H200, GH200 480GB."""
    return re.search(r"\bG?H\d{2,3}\b", name) is not None


@functools.cache
def _kernel(hopper_tile: int | None):
    try:
        from tokamax._src.ops.attention.base import Mask  # the public function does not take ranges of keys
        from tokamax.ops import gpu
    except ImportError as error:
        fix = f"needs the package tokamax (no {error.name}): pip install -e '.[tokamax]', or choose auto or xla"
        raise UserError("attention", "tokamax", fix) from None
    if hopper_tile:
        return _for_hopper(hopper_tile), Mask
    unchecked = {"bypass_device_check": True}  # the check sees this machine's device, not the target of compilation
    forward = gpu.PallasTritonFlashAttention(**unchecked)
    return dataclasses.replace(forward, vjp=dataclasses.replace(forward.vjp, **unchecked)), Mask


def _for_hopper(tile: int):
    """tokamax's Mosaic GPU kernels. They look up this machine's GPU; on a machine without a GPU, which only compiles,
    the answer is replaced."""
    from tokamax._src import gpu_utils
    from tokamax._src.ops.attention.pallas_mosaic_gpu import ConfigSM90
    from tokamax.ops.gpu import PallasMosaicFlashAttention

    if jax.default_backend() != "gpu":
        gpu_utils._compute_capability = lambda device=None: 9.0
        gpu_utils.has_mosaic_gpu_support = lambda device=None: True
    # Not persistent, so that the program does not depend on the compiling machine's number of multiprocessors.
    config = ConfigSM90(block_q=64, block_kv=tile, num_stages=2, persistent=False)
    return PallasMosaicFlashAttention(config=config)
