"""`nag_update_rows` as take, update, put, from the references of the three."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.nag_update import reference as update_reference


def forward(direction, log_norm, update, turn, indices):
    def group(r, s, u, t, i):
        r_new, s_new = update_reference.forward(jnp.take(r, i, axis=0), s[i], u, t)
        return r.at[i].set(r_new), s.at[i].set(s_new)

    return jax.vmap(group)(direction, log_norm, update, turn, indices)
