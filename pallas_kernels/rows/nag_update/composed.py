"""`nag_update_rows` from an implementation of `nag_update` and a module that can `take` and `put` flat rows.

Only the selected rows of the old direction are saved, so that the stream itself can be overwritten. The log
lane, one float per row, is XLA's.
"""

from __future__ import annotations

from types import ModuleType

from pallas_kernels.rows import flat as lane
from pallas_kernels.rows.flat import flat, flat_indices


def forward(inner: ModuleType, copies: ModuleType, direction, log_norm, update, turn, indices):
    where = flat_indices(indices, direction.shape[1])
    selected, s = copies.take(flat(direction), where), log_norm.reshape(-1)
    (new, new_s), _ = inner.forward(selected, lane.take(s, where), flat(update), turn.reshape(-1))
    outputs = (
        copies.put(flat(direction), new, where).reshape(direction.shape),
        lane.put(s, new_s, where).reshape(log_norm.shape),
    )
    return outputs, (selected.reshape(*indices.shape, direction.shape[-1]),)


def backward(inner: ModuleType, copies: ModuleType, residuals, cotangents):
    update, turn, indices, selected = residuals
    g, ds = cotangents
    where = flat_indices(indices, g.shape[1])
    taken = copies.take(flat(g), where), lane.take(ds.reshape(-1), where)
    dr, _, du, dt = inner.backward((flat(selected), flat(update), turn.reshape(-1)), taken)
    d_direction = copies.put(flat(g), dr.astype(g.dtype), where).reshape(g.shape)
    return d_direction, ds, du.reshape(update.shape), dt.reshape(turn.shape)
