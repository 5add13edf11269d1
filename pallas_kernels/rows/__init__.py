"""Row ops of Mixture-of-Depths: take, put, and update in place, by unique int32 indices."""

from pallas_kernels.rows.check_indices import checking_indices as checking_indices
from pallas_kernels.rows.nag_update import nag_update_rows as nag_update_rows
from pallas_kernels.rows.put import put_rows as put_rows
from pallas_kernels.rows.take import take_rows as take_rows
