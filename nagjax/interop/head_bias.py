"""Expresses the bias of a head by other parameters."""

import numpy as np

from nagjax.errors import UserError


def fold_head_bias(files: dict[str, np.ndarray], head: str, norm: str) -> dict[str, np.ndarray]:
    """The tensors without `head.bias`: `head.weight` and the bias of the LayerNorm `norm` before it are changed so that
    the logits stay the same.

    The head reads `g n + c` with the gain g, the bias c, and n orthogonal to (1, ..., 1). So `u (1 / g)^T` may be added
    to the head's table W for any u, because on `g n` it gives 0. With `c' = c + t g` for t = 1 or -1, and D features,
    `u = (b - t W g) / (sum(c / g) + t D)` makes `(W + u (1 / g)^T) c' = W c + b`. The sign of t is that of the sum, so
    that the divisor is never small. Exact except for rounding; W becomes float32.

    Raises UserError if a gain is 0.
    """
    names = f"{head}.weight", f"{head}.bias", f"{norm}.weight", f"{norm}.bias"
    if not all(name in files for name in names):
        return files
    rest = {name: value for name, value in files.items() if name != names[1]}
    table, bias, gain, shift = (files[name].astype(np.float32) for name in names)
    shapes = table.ndim == 2 and bias.shape == table.shape[:1] and gain.shape == shift.shape == table.shape[1:]
    if not shapes or not bias.any():
        return rest if shapes else files
    if not gain.all():
        raise UserError("weights", names[2], "has gains of 0, so that the bias of the head cannot be imported")
    total = np.sum(shift / gain, dtype=np.float64)
    sign = 1.0 if total >= 0.0 else -1.0
    weight = (bias - sign * (table @ gain)) / (total + sign * gain.size)
    table += weight.astype(np.float32)[:, None] / gain
    return rest | {names[0]: table, names[3]: shift + np.float32(sign) * gain}
