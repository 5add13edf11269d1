"""The NAG update together with the modulator that sets its rotation, in one pass. The modulator's equations are in
`modulator`; the GPU kernels, which must visit a row more than once, are in `nag_update_modulated_gpu`."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.checks import check_dtype, check_float, check_shapes
from pallas_kernels.dispatch import Implementation, ImplementationName, Op, run
from pallas_kernels.launch import Block, gpu, raw_triton, tpu
from pallas_kernels.ops import modulator
from pallas_kernels.ops import nag_update as plain
from pallas_kernels.ops import nag_update_modulated_gpu as on_gpu
from pallas_kernels.ops.modulator import dot_on_chip


def nag_update_modulated(
    direction: Float[Array, "*N D"],
    log_norm: Float[Array, "*N"],
    update: Float[Array, "*N D"],
    weight: Float[Array, "D C"],
    bias: Float[Array, " C"],
    logits: Float[Array, " C"],
    beta: Float[Array, ""],
    alpha: Float[Array, ""],
    *,
    implementation: ImplementationName = None,
) -> tuple[Float[Array, "*N D"], Float[Array, "*N"], Float[Array, "*N"]]:
    """`nag_update` with `t = alpha * max(x, 1e-6) ** beta`, `x = softmax(logits) . sigmoid(r weight + bias)`.

    NAG, arXiv:2606.16112, equation 13, followed by 10-17.

    Why this exists: the gate's [N, D] x [D, C] product reads the rows that the update has on chip anyway. Gate and
    update are one kernel: forward reads 2 tensors and writes 1, backward reads 3 and writes 2. On TPU the kernel also
    computes the weight gradient; on GPU that is XLA's product, which reads the direction once more (see
    `nag_update_modulated_gpu`). On a CPU, and for inputs that the kernels refuse, it takes two steps: the gate by
    XLA's matmuls, then `nag_update`.
    Numerics: projections, mixture, power and all parameter gradients in float32; the weight is used in full float32
    precision for float32 rows and with 16 bits for bfloat16 rows (in the direction's gradient: 8). The mixture is
    clamped at 1e-6 before the power;
    below that its gradient is zero. Parameter gradients are summed in an order fixed by the shapes. Saved for the
    backward pass: the inputs except log_norm. Backend: see `pallas_kernels.dispatch`.

    Args:
      direction: rows of RMS 1, any float dtype.
      log_norm: natural logarithm of each row's norm over sqrt(D), float32.
      update: the branch's output, any float dtype.
      weight, bias, logits, beta, alpha: the modulator, float32; C of the order of 32.
      implementation: None for the best on the platform, a name, or names to try in order.

    Returns:
      New direction (dtype of `direction`), log-norm and turn (float32).

    Raises:
      ValueError: shapes that do not match, a wrong dtype, or no implementation that accepts them.
    """
    rows = dict(direction=direction, update=update)
    exact = dict(log_norm=log_norm, weight=weight, bias=bias, logits=logits, beta=beta, alpha=alpha)
    check_shapes(
        "nag_update_modulated",
        {
            "direction": (direction, ("...", "D")),
            "log_norm": (log_norm, ("...",)),
            "update": (update, ("...", "D")),
            "weight": (weight, ("D", "C")),
            "bias": (bias, ("C",)),
            "logits": (logits, ("C",)),
            "beta": (beta, ()),
            "alpha": (alpha, ()),
        },
    )
    check_float("nag_update_modulated", **rows)
    check_dtype("nag_update_modulated", "float32", *rows.values(), **exact)
    return run(OP, implementation, direction, log_norm, update, weight, bias, logits, beta, alpha)


def reference(direction, log_norm, update, weight, bias, logits, beta, alpha):
    exact = jnp.promote_types(direction.dtype, jnp.float32)
    z = jnp.dot(direction.astype(exact), weight, precision="highest") + bias
    mixture = jnp.dot(jax.nn.sigmoid(z), jax.nn.softmax(logits), precision="highest")
    turn = alpha * jnp.maximum(mixture, modulator.LEAST_MIXTURE) ** beta
    return *plain.reference(direction, log_norm, update, turn), turn


# In two steps: the gate by XLA's matmuls, then any implementation of `nag_update`. The gate reads the direction
# a second time; its gradient is the sum of two arrays.


def _forward_in_two(step: str, direction, log_norm, update, weight, bias, logits, beta, alpha):
    turn = _turn(direction, weight, bias, jax.nn.softmax(logits), beta, alpha).turn[:, 0]
    outputs, _ = plain.OP.implementations[step].forward(direction, log_norm, update, turn)
    return (*outputs, turn), ()


def _backward_in_two(step: str, residuals, cotangents):
    direction, update, weight, bias, logits, beta, alpha = residuals
    g, ds, d_turn = cotangents
    shares = jax.nn.softmax(logits)
    state = _turn(direction, weight, bias, shares, beta, alpha)
    dr, ds, du, dt = plain.OP.implementations[step].backward((direction, update, state.turn[:, 0]), (g, ds))
    gate = modulator.gradients(state, shares[None], beta, alpha, (dt + d_turn)[:, None])
    return (
        dr + _back(gate.z, weight, direction.dtype),
        ds,
        du,
        modulator.product(direction.T, gate.z),
        gate.z.sum(0),
        modulator.through_softmax(shares, gate.shares.sum(0)),
        gate.beta.sum(),
        gate.alpha.sum(),
    )


def _turn(direction, weight, bias, shares, beta, alpha) -> modulator.Turn:
    return modulator.turn(modulator.product(direction, weight) + bias, shares[None], beta, alpha)


def _back(dz, weight, dtype):
    """dz W^T: for bfloat16 rows a bfloat16 product, since the sum it enters is rounded to bfloat16 anyway."""
    if dtype != jnp.bfloat16:
        return jnp.dot(dz, weight.T, precision="highest")
    return jnp.dot(dz.astype(dtype), weight.T.astype(dtype))


# On a TPU there is one forward and one backward kernel, which compute the gate's matmuls from the block on chip. So
# the gate needs no pass of its own. Neither does its weight gradient: blocks run in order, so the float32 parameter
# gradients add up block by block in an output that stays on chip. The weight is stored as [C, D], to fill the lanes.


def _tpu_refusal(direction, log_norm, update, weight, *others) -> str | None:
    if refusal := on_gpu.refuse_rows_and_gates(direction, update, weight):
        return refusal
    (width, gates), least = weight.shape, tpu.tile_rows(direction)
    need = least * tpu.row_bytes(plain.BACKWARD, direction) + _weight_bytes(width, gates)
    if need > tpu.VMEM_BYTES:
        allowed = tpu.VMEM_BYTES >> 20
        return f"D = {width}, C = {gates}: {need >> 20} MiB of VMEM for one block and the weight, {allowed} allowed"
    return None


def _weight_bytes(width: int, gates: int) -> int:
    """Bytes of two buffers each for the weight and its gradient, in float32."""
    return 4 * 4 * gates * tpu.lanes(width)


def _tpu_forward(direction, log_norm, update, *parameters):
    def block(gate, at, rows, scalars):
        r, u = rows
        turn = modulator.turn(gate.project(r), *gate.settings).turn
        new = plain.block_forward(at, r.astype(jnp.float32), u.astype(jnp.float32), turn)
        return (new,), (turn,), ()

    rows = direction, update
    (out,), (turn,), _ = _tpu_call(block, plain.FORWARD, rows, (), parameters, rows[:1], scalar_outputs=1)
    return (out, plain.grown(log_norm, turn), turn), ()


def _tpu_backward(residuals, cotangents):
    (direction, update, *parameters), (g, ds, d_turn) = residuals, cotangents

    def block(gate, at, rows, scalars):
        (r, *_), (ds, d_turn) = rows, scalars
        state = modulator.turn(gate.project(r), *gate.settings)
        dr, du, dt = plain.block_backward(at, *(x.astype(jnp.float32) for x in rows), state.turn)
        dt = dt + plain.log_lane_gradient(ds, state.turn) + d_turn
        parts = modulator.gradients(state, *gate.settings, dt)
        sums = [jnp.sum(part, axis=0, keepdims=True) for part in parts]
        return (dr + gate.back(parts.z), du), (), [gate.weight_gradient(parts.z, r), *sums]

    width, gates = parameters[0].shape
    shapes = (gates, width), (1, gates), (1, gates), (1, 1), (1, 1)
    rows, scalars = (direction, update, g), (ds, d_turn)
    (dr, du), _, sums = _tpu_call(block, plain.BACKWARD, rows, scalars, parameters, rows[:2], sums=shapes)
    dw, dz, d_shares, d_beta, d_alpha = (x[0] for x in sums)
    d_logits = modulator.through_softmax(jax.nn.softmax(parameters[2]), d_shares[0])
    return dr, ds, du, dw.T, dz[0], d_logits, d_beta[0, 0], d_alpha[0, 0]


def _tpu_call(body, kernel, rows, scalars, parameters, outputs, **more):
    """Launches one pass in blocks of whole rows, with the gate's parameters on chip."""
    weight, bias, logits, beta, alpha = parameters
    (n, width), dtype, gates = rows[0].shape, rows[0].dtype, bias.shape[0]
    size = tpu.block_rows(kernel, rows[0], reserved=_weight_bytes(width, gates))
    halves = modulator.split(weight.T) if dtype == jnp.bfloat16 else (weight.T,)
    small = [x.reshape(1, -1) for x in (bias, jax.nn.softmax(logits), beta, alpha)]

    def block(first, rows, scalars, whole):
        if n % size:  # values beyond the last row must not enter the sums
            inside = first + jax.lax.broadcasted_iota(jnp.int32, (size, 1), 0) < n
            rows = [jnp.where(inside, x, jnp.zeros_like(x)) for x in rows]
        gate = _Gate(whole[: len(halves)], *whole[len(halves) :])
        return body(gate, Block(width, dtype), rows, scalars)

    backward = kernel is plain.BACKWARD
    name = f"nag_update_modulated_{kernel.verb}"
    cost = on_gpu.estimate(
        bytes_moved(n, width, dtype, gates, backward=backward), n, width, gates, 3 if backward else 1
    )
    return tpu.launch(
        block, rows, scalars, (*halves, *small), size=size, parts=1, outputs=outputs, cost=cost, name=name, **more
    )


class _Gate:
    """The modulator's parameters on chip: `halves` of the weight `[C, D]`, `settings` (p, beta, alpha), and bias."""

    def __init__(self, halves, bias, shares, beta, alpha):
        self.halves, self.bias, self.settings = halves, bias, (shares, beta, alpha)

    def project(self, r):
        """The projection of rows `[R, D]`, `[R, C]`."""
        return sum(dot_on_chip(r, half, (1, 1)) for half in self.halves) + self.bias

    def back(self, dz):
        """dz W^T, `[R, C]` to `[R, D]`, in the precision of the rows."""
        high = self.halves[0]
        return dot_on_chip(dz.astype(high.dtype), high, (1, 0))

    def weight_gradient(self, dz, r):
        """The gradient of the weight, `[C, D]`."""
        parts = modulator.split_on_chip(dz) if len(self.halves) == 2 else (dz,)
        return sum(dot_on_chip(part, r, (0, 0)) for part in parts)


def bytes_moved(rows: int, width: int, dtype: object, gates: int, *, backward: bool = False) -> int:
    """Bytes of one pass: the tensors of `nag_update`, the gate's weight (backward: and its gradient) once, and scalars
    per row. Forward reads and writes a log-norm and writes a turn; backward reads the gradients of both."""
    tensors, scalars, weights = (5, 2, 2) if backward else (3, 3, 1)
    return rows * (tensors * width * jnp.dtype(dtype).itemsize + scalars * 4) + weights * gates * width * 4


def _in_two(step: str) -> Implementation:
    way = plain.OP.implementations[step]

    def refusal(direction, log_norm, update, *parameters) -> str | None:
        return way.refusal(direction, log_norm, update, log_norm)

    forward, backward = (functools.partial(f, step) for f in (_forward_in_two, _backward_in_two))
    return Implementation(forward, backward, way.platforms, refusal, way.unavailable)


OP = Op(
    "nag_update_modulated",
    inputs=(1, 0, 1, None, None, None, None, None),
    outputs=(1, 0, 0),
    keep_inputs=(0, 2, 3, 4, 5, 6, 7),
    reference=reference,
    implementations={
        "mosaic_tpu": Implementation(_tpu_forward, _tpu_backward, tpu.PLATFORMS, _tpu_refusal, bytes_moved=bytes_moved),
        "pallas_triton": on_gpu.by(on_gpu.pallas_call, gpu),
        "triton": on_gpu.by(on_gpu.raw_call, raw_triton),
        "composed": _in_two("pallas_triton"),
        "mosaic_gpu": _in_two("mosaic_gpu"),
        "xla": _in_two("xla"),
    },
)
