"""`add_rms_norm` on GPU by raw Triton kernels: what stays when JAX drops Pallas-Triton.

Why this exists and numerics: as `pallas_triton`. Backend: jax_triton, extra `triton`; see `triton_rows`.
"""

from pallas_kernels import triton_rows
from pallas_kernels.add_rms_norm import block

PLATFORMS = triton_rows.PLATFORMS

forward, backward, refusal, expected_bytes_moved = triton_rows.implementation(block)
