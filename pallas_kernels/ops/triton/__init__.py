"""The kernels again in Triton's own language: what stays when JAX drops Pallas-Triton.

The arithmetic of the ops' files, in the same order; `launch/raw_triton.py` starts them. A module here is named after
its op, its kernels are `forward` and `backward`, and it imports triton: nothing may import it before an op is traced.

A kernel over whole rows takes pointers to its inputs and outputs, then N, D, and the ROWS and COLUMNS >= D of a block,
both powers of two. One with sums over rows walks blocks: its own number, then every PROGRAMS-th of BLOCKS.
"""
