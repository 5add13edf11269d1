"""Peers of `add_rms_norm` in PyTorch on the same device: torch.compile's fusion, and a Triton kernel written by hand.

Both compute `stream + update` and `gain * rms_norm(stream + update)` on bfloat16 rows with float32 statistics, and all
gradients: what the op computes.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.testing import do_bench, do_bench_cudagraph

EPSILON = 1e-6
ROWS_PER_PROGRAM = 32  # of the backward kernel, which sums the gain's gradient over these rows


def measure(shape: tuple[int, int, str], copy: float, rotate: int) -> dict:
    """By peer and pass: `us` (microseconds) and `of_copy`, the share of the copy bandwidth `copy` (GB/s) that one
    visit's bytes reach. In the forward pass also `host_time`, whether the host's time is included. Operands of more
    than `rotate` bytes are visited in turn."""
    rows, width, dtype = shape
    dtype = getattr(torch, dtype)
    make = lambda: torch.randn(rows, width, device="cuda", dtype=dtype)  # noqa: E731
    gain = torch.randn(width, device="cuda", requires_grad=True)
    moved = 4 * rows * width * dtype.itemsize
    sets = [(make().requires_grad_(), make().requires_grad_(), (make(), make())) for _ in range(-(-rotate // moved))]
    found, failed = {}, {}
    for name, function in {"torch_compile": compiled(), "triton_by_hand": _AddNorm.apply}.items():
        try:
            forward, by_host = _microseconds(lambda one, of=function: of(*one[:2], gain), sets)
            both, both_by_host = _microseconds(lambda one, of=function: _gradients(of, *one[:2], gain, one[2]), sets)
        except Exception as error:  # for example no compiler for Inductor; the other peer still has figures
            failed[name] = _in_short(error)
            continue
        times = {"forward": forward} | ({"backward": both - forward} if both > forward else {})
        found[name] = {what: {"us": us, "of_copy": moved / us / 1e3 / copy} for what, us in times.items()}
        if by_host or both_by_host:
            found[name]["forward"]["host_time"] = True
    if not found:
        raise RuntimeError(str(failed))
    told = {"implementations": found}
    if "triton_by_hand" in found:
        stream, update, pulled = sets[0]
        try:
            told["errors_triton_by_hand"] = _errors(_AddNorm.apply, stream, update, gain, pulled)
        except Exception as error:  # the times stay
            failed["errors_triton_by_hand"] = _in_short(error)
    return told | ({"failed": failed} if failed else {})


def _in_short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[:400]


def _gradients(function, stream, update, gain, pulled):
    """Outputs followed by gradients."""
    outputs = function(stream, update, gain)
    return *outputs, *torch.autograd.grad(outputs, (stream, update, gain), pulled)


def _microseconds(call, sets) -> tuple[float, bool]:
    """The median time of a call, and whether the host's time is included. The results of a round over all sets are kept
    until its end, so that none is written to memory that is still in a cache."""

    def visit():
        return [call(one) for one in sets]

    try:
        return 1e3 * do_bench_cudagraph(visit, return_mode="median") / len(sets), False
    except RuntimeError:  # no graph of it can be captured
        torch.cuda.synchronize()
        return 1e3 * do_bench(visit, return_mode="median") / len(sets), True


def _errors(function, stream, update, gain, pulled) -> list[float]:
    """Relative error (2-norm) of the normalised rows and of each gradient, against float64."""
    wide = [x.detach().double().requires_grad_() for x in (stream, update, gain)]
    exact = _gradients(_eager, *wide, tuple(x.double() for x in pulled))[1:]
    found = _gradients(function, stream, update, gain, pulled)[1:]
    return [float((a.double() - b).norm() / b.norm()) for a, b in zip(found, exact, strict=True)]


def compiled():
    """torch.compile's fusion, for the next shape only: from the second shape on, torch.compile treats sizes as unknown
    and makes a different kernel."""
    torch._dynamo.reset()
    return torch.compile(_eager, dynamic=False)


def _eager(stream, update, gain):
    total = stream + update
    wide = total.to(torch.promote_types(total.dtype, torch.float32))
    normed = gain * wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPSILON)
    return total, normed.to(total.dtype)


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, stream, update, gain):
        total, normed = torch.empty_like(stream), torch.empty_like(stream)
        rows, width = stream.shape
        block, warps = _launch(width)
        _forward[(rows,)](stream, update, gain, total, normed, width, EPSILON, block, num_warps=warps)
        ctx.save_for_backward(total, gain)
        return total, normed

    @staticmethod
    def backward(ctx, d_total, d_normed):
        total, gain = ctx.saved_tensors
        rows, width = total.shape
        programs = triton.cdiv(rows, ROWS_PER_PROGRAM)
        d_stream = torch.empty_like(total)
        d_gain = torch.empty(programs, width, device=total.device)
        block, warps = _launch(width)
        arrays = total, gain, d_total, d_normed, d_stream, d_gain
        _backward[(programs,)](*arrays, rows, width, EPSILON, ROWS_PER_PROGRAM, block, num_warps=warps)
        return d_stream, d_stream, d_gain.sum(0)


def _launch(width: int) -> tuple[int, int]:
    block = triton.next_power_of_2(width)
    return block, min(max(block // 512, 1), 16)


@triton.jit
def _forward(stream, update, gain, total, normed, width, epsilon, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    there, row = at < width, tl.program_id(0).to(tl.int64) * width
    h = tl.load(stream + row + at, there, 0.0).to(tl.float32) + tl.load(update + row + at, there, 0.0).to(tl.float32)
    stored = h.to(total.dtype.element_ty)
    tl.store(total + row + at, stored, there)
    h = stored.to(tl.float32)
    inverse = tl.rsqrt(tl.sum(h * h, 0) / width + epsilon)
    tl.store(normed + row + at, tl.load(gain + at, there, 0.0) * h * inverse, there)


@triton.jit
def _backward(
    total, gain, d_total, d_normed, d_stream, d_gain, rows, width, epsilon, EACH: tl.constexpr, BLOCK: tl.constexpr
):
    at = tl.arange(0, BLOCK)
    there, program = at < width, tl.program_id(0)
    weight, summed = tl.load(gain + at, there, 0.0), tl.zeros((BLOCK,), tl.float32)
    for i in range(EACH):
        number = program * EACH + i
        if number < rows:
            row = number.to(tl.int64) * width
            h = tl.load(total + row + at, there, 0.0).to(tl.float32)
            pulled = tl.load(d_normed + row + at, there, 0.0).to(tl.float32)
            inverse = tl.rsqrt(tl.sum(h * h, 0) / width + epsilon)
            unit, weighed = h * inverse, pulled * weight
            through = inverse * (weighed - unit * (tl.sum(weighed * unit, 0) / width))
            past = tl.load(d_total + row + at, there, 0.0).to(tl.float32)
            tl.store(d_stream + row + at, through + past, there)
            summed += pulled * unit
    tl.store(d_gain + program * width + at, summed, there)
