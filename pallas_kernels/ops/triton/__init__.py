"""The kernels in Triton's own language, for when JAX drops Pallas-Triton.

They have the arithmetic of the ops' files, in the same order; `launch/raw_triton.py` starts them. A module is named
after its op, and its kernels are `forward` and `backward` (for rows by index `take` and `put`). It imports triton, so
it is only imported when an op is traced.

A kernel over whole rows takes pointers to its inputs and outputs, then N, D, and the ROWS and COLUMNS >= D of a block,
both powers of two. In a kernel with sums over rows, program p goes through blocks p, p + PROGRAMS, ... of BLOCKS.
"""
