"""Row kernels for the residual boundary of deep Transformers, on TPU, GPU and CPU.

Pure functions on arrays with hand-written derivatives; the package needs JAX and jaxtyping. Every op takes rows
`[..., D]` of any width and runs inside jit, scan, remat and shard_map. It chooses its implementation for the platform
for which it is lowered; `choices` lists the implementation of each platform, and why others cannot be used.
"""

from pallas_kernels.checks import checking_indices as checking_indices
from pallas_kernels.dispatch import using as using
from pallas_kernels.implementations import choices as choices
from pallas_kernels.ops.add_rms_norm import add_rms_norm as add_rms_norm
from pallas_kernels.ops.nag_update import nag_update as nag_update
from pallas_kernels.ops.nag_update_modulated import nag_update_modulated as nag_update_modulated
from pallas_kernels.ops.nag_update_rows import nag_update_rows as nag_update_rows
from pallas_kernels.ops.review_update import review_update as review_update
from pallas_kernels.ops.rows import put_rows as put_rows
from pallas_kernels.ops.rows import take_rows as take_rows
from pallas_kernels.placement import row_placement as row_placement
from pallas_kernels.placement import shard_rows as shard_rows
