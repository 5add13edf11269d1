"""`nag_update_modulated` in plain jnp: the modulator, then the reference update. Differentiated by JAX
itself."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.nag_update import reference as update_reference
from pallas_kernels.nag_update_modulated.modulator import LEAST_MIXTURE


def forward(direction, log_norm, update, weight, bias, logits, beta, alpha):
    exact = jnp.promote_types(direction.dtype, jnp.float32)
    z = jnp.dot(direction.astype(exact), weight, precision="highest") + bias
    mixture = jax.nn.sigmoid(z) @ jax.nn.softmax(logits)
    turn = alpha * jnp.maximum(mixture, LEAST_MIXTURE) ** beta
    return *update_reference.forward(direction, log_norm, update, turn), turn
